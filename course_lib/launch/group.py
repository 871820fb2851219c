"""Keep the default process group up for the length of a ``with`` block."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from course_lib.launch.rendezvous import restart_safe_init_method

if TYPE_CHECKING:
    import torch

# On GPUs a tensor that a notebook cell left on the CPU still finds its way.
BOTH = "cpu:gloo,cuda:nccl"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def choose_backend(ranks_here: int, backend: str | None = None) -> str:
    """``nccl`` where every rank of this machine gets a GPU of its own, else ``gloo``; or what the caller asked for.

    Args:
        ranks_here: ranks on this machine.
        backend: ``"nccl"``, ``"gloo"`` or ``None`` for the choice above.

    Raises:
        ValueError: an unknown backend, or NCCL with more ranks than GPUs.
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
    is alone: rank 0 of 1.

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
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def rank_device() -> torch.device:
    """Return this rank's device: its own GPU under NCCL, else the CPU. The default process group must be up."""
    import torch
    import torch.distributed as dist

    on_gpu = "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
