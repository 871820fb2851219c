"""Give the ranks that torchrun has restarted a store without the addresses of their predecessors.

torchrun keeps one key-value store for all restarts of a job. A restarted rank that is quicker than its peer reads there
the address of the peer's dead predecessor, and the restart fails with "Connection refused", sometimes until no restart is left
(https://github.com/pytorch/pytorch/issues/135712). Here each restart gets a part of the store to itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

SCHEME = "restarted"


def restart_safe_init_method() -> str:
    """Return an ``init_method`` for a job on one machine, where every rank counts the same restarts; ``env://`` for others.

    On several machines each torchrun counts its own, so the counts cannot tell the restarts apart; there
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each restart a store of its own.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1" or "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return "env://"
    if SCHEME not in _registered:
        from torch.distributed.rendezvous import register_rendezvous_handler

        register_rendezvous_handler(SCHEME, _rendezvous)
        _registered.add(SCHEME)
    return f"{SCHEME}://"


_registered: set[str] = set()


def _rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=10), **more: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    import torch.distributed as dist

    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    for store, rank, world_size in dist.rendezvous("env://", timeout=timeout, **more):
        yield dist.PrefixStore(f"restart {restart}", store), rank, world_size
