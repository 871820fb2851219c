"""Delay DDP's buckets to the speed of a slow link, where the machine allows no network namespaces.

The hook starts the real all-reduce at once and lets its future complete no earlier than the wire would. Backward goes
on meanwhile, as it would with a real network card, and the gradients are DDP's own.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from course_lib.collectives.links import Link, ring_seconds

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    Model = TypeVar("Model", bound=DistributedDataParallel)

_link_of_this_rank: Link | None = None  # set in a rank of `Hosts.launch`, before the learner's function runs


def use(link: Link | None) -> None:
    """What ``through_the_link`` emulates in this process; ``None``: the link is there already, or is to be fast."""
    global _link_of_this_rank
    _link_of_this_rank = link


def through_the_link(model: Model) -> Model:
    """Send a DDP model's gradients over the emulated link. Call it right after ``DistributedDataParallel(...)``.

    Under namespaces the link itself is slow and nothing is done. Otherwise a comm hook delays each bucket by what a ring
    all-reduce of its bytes costs on the link; only gradients are delayed then, nothing else that the ranks send.

    Returns:
        the model.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"{type(model).__name__} has no buckets to delay: wrap it in DistributedDataParallel first.")
    if _link_of_this_rank is not None:
        _register(model, _Wire(_link_of_this_rank))
    return model


class _Wire:
    """Carries one bucket at a time: the next one leaves when the one before has arrived."""

    def __init__(self, link: Link) -> None:
        self._link, self._lock, self._free_at = link, threading.Lock(), 0.0

    def arrival(self, ranks: int, num_bytes: int) -> float:
        """Moment (``time.perf_counter``) at which a bucket handed over now has been all-reduced."""
        takes = ring_seconds("all_reduce", ranks, num_bytes, self._link)
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + takes
            return self._free_at


def _register(model: Any, wire: _Wire) -> None:
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()

    def hook(state: None, bucket):
        gradients = bucket.buffer()
        arrives = wire.arrival(ranks, gradients.nbytes)
        future = dist.all_reduce(gradients.div_(ranks), async_op=True).get_future()

        def done(reduced):
            time.sleep(max(0.0, arrives - time.perf_counter()))
            return reduced.value()[0]

        return future.then(done)

    # DDP reads the types off the function, and cannot resolve them as text
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(None, hook)
