"""Delay all-reduces to the speed of a slow link: no root, no network namespaces.

The real all-reduce starts at once, and completes no earlier than the wire would. Backward goes on meanwhile, as it
would with a real network card, and the gradients are those of the real all-reduce.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from course_lib.collectives.links import Link, ring_seconds

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    Model = TypeVar("Model", bound=DistributedDataParallel)


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

    def get_future(self) -> Any:
        def arrive(future: Any) -> Any:
            time.sleep(max(0.0, self._arrives - time.perf_counter()))
            return future.value()

        return self._work.get_future().then(arrive)


def slow_down(link: Link) -> Wire:
    """From now on ``dist.all_reduce`` takes as long in this process as over the link; nothing else is delayed."""
    import torch.distributed as dist

    wire, send = Wire(link), dist.all_reduce

    @functools.wraps(send)
    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        arrives = wire.arrival(dist.get_world_size(group), tensor.nbytes)
        delayed = _Delayed(send(tensor, op, group, async_op=True), arrives)
        return delayed if async_op else delayed.wait()

    dist.all_reduce = all_reduce
    return wire


@contextmanager
def slow_link(link: Link) -> Iterator[Wire]:
    """`slow_down` for the block, inside a rank; the wire keeps when each message was on it."""
    import torch.distributed as dist

    before = dist.all_reduce
    try:
        yield slow_down(link)
    finally:
        dist.all_reduce = before


def through_the_link(model: Model) -> Model:
    """Send a DDP model's buckets by ``dist.all_reduce``, so that an emulated link delays them, too; returns the model.

    Call it right after ``DistributedDataParallel(...)``, whose own all-reduces are called from C++.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"{type(model).__name__} has no buckets to delay: wrap it in DistributedDataParallel first.")

    def average(state, bucket):
        mean = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, average)
    return model
