"""Limit the memory that this process may still take, so that its allocator refuses the next tensor.

with memory_limit(300 * 2**20):
    train()          # raises where its tensors need more, as it would on a card of that size
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from course_lib.launch.emulation.namespaces import CannotEmulate
from course_lib.launch.failures import RankFailed
from course_lib.launch.run import launch

# glibc keeps freed blocks of up to 32 MiB for later, in pieces that the next tensor may not fit into. A threshold that is set
# stays: from then on this process takes larger blocks from the kernel, one by one, and gives each back when it is freed.
M_MMAP_THRESHOLD, LARGE, PLUG = -3, 128 * 1024, 256 * 1024
COLLECT_OFTEN = (200, 1, 1)  # for gc: tensors in a reference cycle stay, and count, until Python looks for cycles


@contextmanager
def memory_limit(num_bytes: float, *, device: str | None = None) -> Iterator[None]:
    """Let this process take at most ``num_bytes`` beyond what it has now; afterwards it may take what it could before.

    On the CPU the kernel keeps the limit (``RLIMIT_DATA``: private writable memory, where every tensor's bytes are), and
    PyTorch's allocator raises RuntimeError "can't allocate memory: you tried to allocate ... bytes". On CUDA the caching
    allocator keeps it, and raises ``torch.OutOfMemoryError``. The stacks and heaps of new threads count on the CPU, the
    allocator's rounding on CUDA: leave a few MiB of room, and import what the code needs before.

    A limit above what the process may take already changes nothing. Limits nest: the inner one can only be tighter.

    Args:
        num_bytes: more than 0.
        device: "cpu" or "cuda"; None takes CUDA where this process uses it.

    Raises:
        ValueError: a limit that is no positive number, or a device of another kind.
        CannotEmulate: the system keeps no such limit (macOS, Windows), or there is no CUDA device.
    """
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, (int, float)) or not 0 < num_bytes < math.inf:
        raise ValueError(f"num_bytes={num_bytes!r}: give the bytes that may be taken from here on, more than 0.")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device={device!r}: memory is limited on 'cpu' or 'cuda'.")
    torch = sys.modules.get("torch")
    in_use = torch is not None and torch.cuda.is_initialized()
    with _of_cuda(num_bytes) if device == "cuda" or (device is None and in_use) else _of_process(num_bytes):
        yield


@contextmanager
def _of_process(num_bytes: float) -> Iterator[None]:
    if sys.platform != "linux":
        raise CannotEmulate(
            f"{sys.platform} keeps no limit on a process's memory (RLIMIT_DATA is Linux's): read the kept outputs, or "
            "run this in a Linux container."
        )
    import gc
    import resource

    thresholds = gc.get_threshold()
    give_back_free_memory()  # else what the process has freed, and not returned, could be taken beyond the limit
    plugs = _plug_kept_memory()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    ceilings = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([data_bytes() + int(num_bytes), *ceilings]), before[1]))
    gc.freeze()  # what is there already need not be looked at again and again
    gc.set_threshold(*COLLECT_OFTEN)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        resource.setrlimit(resource.RLIMIT_DATA, before)
        for plug in plugs:
            _libc().free(plug)


def attempt(name: str, function: Callable[..., Any], *args: Any, ranks: int = 2) -> None:
    """Launch ``function(*args)``, which limits its memory or checks itself, and print that it fits, or what failed where."""
    try:
        launch(function, *args, ranks=ranks, threads=1, quiet=True)
        print(f"{name}: fits")
    except RankFailed as error:
        message = error.cause_message.split("DefaultCPUAllocator: ")[-1]
        message = re.split(r"\. (?:Error|GPU) ", message)[0].rstrip(".")  # both allocators go on for lines
        print(f"{name}: {message}, in {error.where.split(': ', 1)[-1]}")


def data_bytes() -> int:
    """Private writable memory of this process, as the kernel counts it against the limit (Linux)."""
    with open("/proc/self/status") as status:
        (kilobytes,) = [line.split()[1] for line in status if line.startswith("VmData:")]
    return int(kilobytes) * 1024


def give_back_free_memory() -> None:
    """Hand what this process has freed back to the system, and from now on every larger block as soon as it is freed."""
    import gc

    gc.collect()
    libc = _libc()
    if hasattr(libc, "malloc_trim"):  # glibc; musl gives freed memory back by itself
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        libc.malloc_trim(0)


def _plug_kept_memory() -> list[int]:
    """Pointers to blocks that fill what the allocator could not give back, because something alive lies above it."""
    plugs: list[int] = []
    while True:
        before = data_bytes()
        plug = _libc().malloc(PLUG)
        if plug is None:
            return plugs
        if data_bytes() > before:  # this one is new memory
            _libc().free(plug)
            return plugs
        plugs.append(plug)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    return libc


@contextmanager
def _of_cuda(num_bytes: float) -> Iterator[None]:
    import torch

    if not torch.cuda.is_available():
        raise CannotEmulate("There is no CUDA device whose memory could be limited here: leave device out.")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(min(before, (torch.cuda.memory_reserved() + num_bytes) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
