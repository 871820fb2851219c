"""The host's side of a rank: the pages that it takes, and what is copied between the host and the rank's device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.launch.emulation.memory_limit import give_back_free_memory
from course_lib.observe.holdings import holdings
from course_lib.observe.memory import storage_of

POLL = 0.001  # seconds


@contextmanager
def resident_peak() -> Iterator[dict[str, int]]:
    """Find the most memory that this process takes in the block, beyond what it has at the start.

    Pages count while they are resident, those of mapped files too: safetensors maps its files. A peak that is over before
    the next look, about a millisecond later, is missed. From here on malloc gives larger blocks back as they are freed.

    Yields:
        A dictionary that holds bytes once the block is over: "resident" in the host's memory, of these "mapped" from
        files or shared (at their own peak; 0 where the system does not tell), and on a GPU the "device".
    """
    give_back_free_memory()
    process, found, over = psutil.Process(), {"resident": 0, "mapped": 0}, threading.Event()

    def now() -> dict[str, int]:
        info = process.memory_info()
        return {"resident": info.rss, "mapped": getattr(info, "shared", 0)}

    before = now()

    def poll() -> None:
        done = False
        while not done:
            done = over.wait(POLL)  # one more look when it is over
            for name, size in now().items():
                found[name] = max(found[name], size - before[name])

    on_gpu = torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    poller = threading.Thread(target=poll)
    poller.start()
    try:
        yield found
    finally:
        over.set()
        poller.join()
        if on_gpu:
            found["device"] = torch.cuda.max_memory_allocated() - allocated


class HostCopies(TorchDispatchMode):
    """Count what is copied between a DeepSpeed engine's device and the host memory that it offloads to.

    On CPU ranks both are one memory. There a tensor lies on the host if `holdings` says that offloading put it there;
    stage 3 then leaves out copies that it would make on a GPU, so count stages 1 and 2.

    Attributes:
        down, up: bytes copied to the host, and from the host.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine
        self.down = self.up = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            self.down += source.nbytes if self._on_host(target) and not self._on_host(source) else 0
            self.up += source.nbytes if self._on_host(source) and not self._on_host(target) else 0
        return func(*args, **(kwargs or {}))

    def _on_host(self, tensor: torch.Tensor) -> bool:
        if torch.cuda.is_initialized():
            return not tensor.is_cuda
        storage = storage_of(tensor)._cdata
        return any(host and storage == storage_of(t)._cdata for _, host, ts in holdings(self.engine) for t in ts)
