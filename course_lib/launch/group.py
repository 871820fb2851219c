"""Bring the process groups up, and take them down before the interpreter is taken down.

gloo works in threads of its own. Such a thread needs Python's lock to let go of a tensor, or to call back. If it asks
for it while the interpreter is torn down, Python 3.13 and earlier end the thread in the midst of its C++ code, which
ends the process: "terminate called without an active exception", SIGABRT (PyTorch issue 190489).
``destroy_process_group`` waits for these threads, but only where it drops the last hold on the group. Hence
:func:`take_down` before every end, and :func:`end_process`, which tears nothing down, for the training programs.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from course_lib.launch.rendezvous import restart_safe_init_method

if TYPE_CHECKING:
    import torch

# On GPUs a tensor that a notebook cell left on the CPU still finds its way.
BOTH = "cpu:gloo,cuda:nccl"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
PATIENCE = 5.0  # seconds that a process which ends without having waited for its operations gives them


def choose_backend(ranks_here: int, backend: str | None = None) -> str:
    """``nccl`` where every rank of this machine gets a GPU of its own, else ``gloo``; or what the caller asked for.

    Args:
        ranks_here: ranks on this machine.
        backend: ``"nccl"``, ``"gloo"`` or ``None`` for the choice above.
    """
    import torch

    gpus = torch.cuda.device_count()
    if backend is None:
        return "nccl" if 0 < ranks_here <= gpus else "gloo"
    if backend not in ("nccl", "gloo"):
        raise ValueError(
            f"backend={backend!r} is not one of 'nccl', 'gloo'; leave it out to take what the machine has."
        )
    if backend == "nccl" and ranks_here > gpus:
        raise ValueError(
            f"NCCL needs one GPU a rank: you asked for {ranks_here} ranks and this machine has {gpus} GPU(s). "
            + (f"Use at most {gpus} ranks, or " if gpus else "Use ")
            + "backend='gloo' to run the ranks on the CPU."
        )
    return backend


@contextmanager
def process_group(backend: str | None = None, *, init_method: str = "", timeout: float = 600.0) -> Iterator[str]:
    """Bring the default process group up, give this rank its device, and take the group down again. Nothing else.

    Under ``torchrun`` the environment says which rank this is; without one (a plain ``python script.py``) the rank
    is alone: rank 0 of 1. An exception in the block leaves it after :data:`PATIENCE` at the latest: what this rank has
    begun and its peers never join does not hold it back.

    Args:
        backend: ``"nccl"``, ``"gloo"`` or ``None`` to take NCCL where each local rank has a GPU.
        init_method: where the ranks meet, as ``torch.distributed.init_process_group`` takes it; "" for where the
            environment says, and for a place of their own after torchrun has restarted them (see ``rendezvous``).
        timeout: seconds after which a collective that some rank never joins becomes an error.

    Yields:
        the device of this rank, ``"cuda:1"`` or ``"cpu"``.
    """
    import torch
    import torch.distributed as dist

    alone = "RANK" not in os.environ
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = choose_backend(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), backend)
    device = f"cuda:{local_rank}" if chosen == "nccl" else "cpu"
    if chosen == "nccl":
        torch.cuda.set_device(local_rank)
    # Its functions take the default group as a default argument, on import: after the group is up they keep it, and its
    # threads, for ever. DDP imports it.
    import torch.distributed.nn.functional

    store = dist.HashStore() if alone else None  # a rank that is alone needs nobody to meet, so it opens no port
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group(
        BOTH if chosen == "nccl" else chosen,
        init_method=None if alone else init_method or restart_safe_init_method(),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield device
    except BaseException:
        take_down(PATIENCE)
        raise
    take_down()


def take_down(patience: float = float("inf")) -> None:
    """Wait for every collective that this rank has begun, and destroy all process groups, whoever brought them up.

    Args:
        patience: seconds to wait. What is still under way then is given up, and the groups stay: to destroy them would
            wait for it, for as long as their own timeout. NCCL's stay in any case, with a limit: where a peer has
            failed, destroying may wait for it, and the process's end aborts the communicators without waiting.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return
    give_up = time.monotonic() + patience
    while _collectives_under_way():
        if time.monotonic() > give_up:
            return
        time.sleep(0.01)
    if patience == float("inf") or "nccl" not in dist.get_backend():
        dist.destroy_process_group()


atexit.register(take_down, PATIENCE)  # for a group that a library or a script has brought up


def _collectives_under_way() -> int:
    """gloo collectives that this process has begun and that have not ended, as PyTorch's flight recorder has them."""
    from torch._C._distributed_c10d import _dump_fr_trace

    trace = pickle.loads(_dump_fr_trace(includeCollectives=True, includeStackTraces=False))
    return sum(not entry["retired"] for entry in trace.get("entries", ()))


def end_process(status: int) -> NoReturn:
    """End this process as ``multiprocessing`` ends its own: threads, exit handlers, output, and no teardown after that.

    DTensor's caches keep every DeviceMesh, so that after FSDP2 or tensor parallelism gloo's threads outlive the groups.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    exit_now(status)


def exit_now(status: int) -> NoReturn:
    """End this process with what it has printed, and without any clean-up, which could wait for its peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def rank_device() -> torch.device:
    """Return this rank's device: its own GPU under NCCL, else the CPU. The default process group must be up."""
    import torch
    import torch.distributed as dist

    on_gpu = "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
