"""Time a collective by size, on real ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from course_lib.collectives.links import Fit, algorithm_bandwidth, bus_bandwidth, fit
from course_lib.launch import launch, rank_device
from course_lib.stamp import stamp
from course_lib.validation import pick, positive

if TYPE_CHECKING:
    import torch

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
_ITEM = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class Point:
    """One size of a curve.

    Attributes:
        bytes: payload in nccl-tests' sense (see ``course_lib.collectives.links.algorithm_bandwidth``).
        seconds, fastest, slowest: median and extremes over the repeats; each repeat's time is its slowest rank's.
        algbw, busbw: algorithm and bus bandwidth of the median, bytes/s.
    """

    bytes: int
    seconds: float
    fastest: float
    slowest: float
    algbw: float
    busbw: float


@dataclass(frozen=True)
class Curve:
    """What ``bench_collective`` measured: the points by size, and where and when."""

    kind: str
    ranks: int
    repeats: int
    points: tuple[Point, ...]
    stamp: dict[str, str | int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    @property
    def sizes(self) -> list[int]:
        """Payloads, bytes."""
        return [point.bytes for point in self.points]

    @property
    def seconds(self) -> list[float]:
        """Medians."""
        return [point.seconds for point in self.points]

    def fit(self, *, sizes: Sequence[int] | None = None) -> Fit:
        """Alpha and beta of the curve, or of those of its sizes that are named.

        Args:
            sizes: payloads to fit on, as they stand in ``self.sizes``; ``None`` for all.
        """
        for size in sizes or ():
            pick("size", size, self.sizes)
        chosen = [p for p in self.points if sizes is None or p.bytes in sizes]
        return fit([p.bytes for p in chosen], [p.seconds for p in chosen])


def bench_collective(
    kind: str,
    sizes: Sequence[int],
    *,
    ranks: int,
    repeats: int = 15,
    warm_up: int = 2,
    backend: str | None = None,
) -> Curve:
    """Time the library's collective on real ranks, fp32, one call at a time.

    Before each call the ranks meet in a barrier; the clock runs until the result is there (on CUDA: until the device is
    idle). Rounds go through all sizes in turn, so that a noisy second does not fall on one size alone. A single call
    includes the cost of starting it, which nccl-tests' averages over many calls in flight hide.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce".
        sizes: payloads in bytes, each above 0; rounded up to whole fp32 numbers per rank.
        ranks: 2 or more.
        repeats: rounds that count.
        warm_up: rounds before them that do not.
        backend: "gloo", "nccl", None for what the machine has.

    Raises:
        ValueError: an unknown kind, numbers that make no sense.
        course_lib.launch.RankFailed, course_lib.launch.RanksHung: as ``launch``.
    """
    pick("kind", kind, KINDS)
    if not len(sizes):
        raise ValueError("sizes is empty: give the payloads to measure, in bytes.")
    for size in sizes:
        positive(size=size)
    for name, value, least in (("repeats", repeats, 1), ("warm_up", warm_up, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
    if type(ranks) is not int or ranks < 2:
        raise ValueError(f"ranks={ranks!r}: a collective to be timed takes at least 2.")
    unit = _ITEM * ranks
    payloads = sorted({-(-int(size) // unit) * unit for size in sizes})
    run = launch(
        _time_all, kind, payloads, repeats, warm_up, ranks=ranks, backend=backend, threads=1, quiet=True, timeout=600
    )
    points = []
    for payload, times in zip(payloads, run.results[0], strict=True):
        middle = statistics.median(times)
        algbw, busbw = algorithm_bandwidth(payload, middle), bus_bandwidth(kind, payload, ranks, middle)
        points.append(Point(payload, middle, min(times), max(times), algbw, busbw))
    return Curve(kind, ranks, repeats, tuple(points), stamp(ranks=ranks, backend=run.stamp["backend"]))


def _time_all(kind: str, payloads: list[int], repeats: int, warm_up: int) -> list[list[float]]:
    """In a rank. Returns for each payload the seconds of the slowest rank, by repeat."""
    import torch
    import torch.distributed as dist

    device = rank_device()
    finish: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    calls = [_call(kind, payload // _ITEM, device) for payload in payloads]
    times = torch.zeros(len(calls), repeats, dtype=torch.float64, device=device)
    for turn in range(-warm_up, repeats):
        for i, call in enumerate(calls):
            dist.barrier()
            finish()
            began = time.perf_counter()
            call()
            finish()
            if turn >= 0:
                times[i, turn] = time.perf_counter() - began
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def _call(kind: str, numbers: int, device: torch.device) -> Callable[[], Any]:
    """The collective over `numbers` fp32 numbers, on tensors that are made once."""
    import torch
    import torch.distributed as dist

    share = numbers // dist.get_world_size()
    # zeros, not ones: an all-reduce in place doubles what it finds each time, and inf may take another path
    whole = torch.zeros(numbers, device=device)
    if kind == "all_gather":
        part = torch.zeros(share, device=device)
        return lambda: dist.all_gather_into_tensor(whole, part)
    if kind == "reduce_scatter":
        part = torch.zeros(share, device=device)
        return lambda: dist.reduce_scatter_tensor(part, whole)
    if kind == "all_to_all":
        other = torch.zeros(numbers, device=device)
        return lambda: dist.all_to_all_single(other, whole)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, 0)
    if kind == "reduce":
        return lambda: dist.reduce(whole, 0)
    return lambda: dist.all_reduce(whole)
