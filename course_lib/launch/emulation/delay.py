"""Delay all-reduces to the speed of a slow link: no root, no network namespaces.

The real all-reduce starts at once, and completes no earlier than the wire would. Backward goes on meanwhile, as it
would with a real network card, and the gradients are those of the real all-reduce.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from course_lib.collectives.links import Link, ring_seconds

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    Model = TypeVar("Model", bound=DistributedDataParallel)

_wire: Wire | None = None  # of this rank; set by `Hosts.launch` before the learner's function runs, and by `slow_link`


def use(link: Link | None) -> None:
    """What ``through_the_link`` emulates in this process; ``None``: the link is there already, or is to be fast."""
    global _wire
    _wire = None if link is None else Wire(link)


@contextmanager
def slow_link(link: Link) -> Iterator[Wire]:
    """Within the block, ``dist.all_reduce`` and the buckets of ``through_the_link`` take as long as over this link.

    Call it inside a rank. Nothing else that the ranks send is delayed.

    Yields:
        the wire, which keeps when each message was on it.
    """
    import torch.distributed as dist

    global _wire
    before, send = _wire, dist.all_reduce
    _wire = wire = Wire(link)

    @functools.wraps(send)
    def all_reduce(tensor: Any, *args: Any, async_op: bool = False, **options: Any) -> _Delayed | None:
        arrives = wire.arrival(dist.get_world_size(), tensor.nbytes)
        delayed = _Delayed(send(tensor, *args, async_op=True, **options), arrives)
        return delayed if async_op else delayed.wait()

    dist.all_reduce = all_reduce
    try:
        yield wire
    finally:
        dist.all_reduce, _wire = send, before


def through_the_link(model: Model) -> Model:
    """Send a DDP model's gradients over the emulated link. Call it right after ``DistributedDataParallel(...)``.

    The link is that of the ``slow_link`` around it, or of the emulated host. Under namespaces the link itself is slow
    and nothing is done. Otherwise a comm hook delays each bucket by what a ring all-reduce of its bytes costs on the
    link; only gradients are delayed then, nothing else that the ranks send.

    Returns:
        the model.

    Raises:
        ValueError: not a ``DistributedDataParallel``.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"{type(model).__name__} has no buckets to delay: wrap it in DistributedDataParallel first.")
    if _wire is not None:
        _register(model, _wire)
    return model


class Wire:
    """Carries one message at a time: the next one leaves when the one before has arrived.

    Each rank has its own, which starts counting when this rank hands a message over: right for ranks that are in step.

    Attributes:
        messages: (start, end) of each message on it so far, in seconds of ``time.perf_counter``.
    """

    def __init__(self, link: Link) -> None:
        self._link, self._lock, self._free_at = link, threading.Lock(), 0.0
        self.messages: list[tuple[float, float]] = []

    def arrival(self, ranks: int, num_bytes: int) -> float:
        """Moment (``time.perf_counter``) at which a message handed over now has been all-reduced."""
        takes = ring_seconds("all_reduce", ranks, num_bytes, self._link)
        with self._lock:
            start = max(self._free_at, time.perf_counter())
            self._free_at = start + takes
            self.messages.append((start, self._free_at))
            return self._free_at


class _Delayed:
    """What an asynchronous all-reduce returns: the handle of the real one, which the wire holds back."""

    def __init__(self, work: Any, arrives: float) -> None:
        self._work, self._arrives = work, arrives

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._arrives - time.perf_counter()))


def _register(model: Any, wire: Wire) -> None:
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    send = inspect.unwrap(dist.all_reduce)  # of slow_link, which would delay it once more

    def hook(state: None, bucket):
        gradients = bucket.buffer()
        arrives = wire.arrival(ranks, gradients.nbytes)
        future = send(gradients.div_(ranks), async_op=True).get_future()

        def done(reduced):
            time.sleep(max(0.0, arrives - time.perf_counter()))
            return reduced.value()[0]

        return future.then(done)

    # DDP reads the types off the function, and cannot resolve them as text
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(None, hook)
