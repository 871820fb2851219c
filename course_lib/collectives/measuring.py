"""Time the library's all-reduce by size, on real ranks, and fit alpha and beta to it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from course_lib.launch import launch, rank_device
from course_lib.stamp import stamp
from course_lib.units import nice_bytes
from course_lib.validation import check_counts, pick, positive

_ITEM = 4  # bytes of an fp32 number
_ROUNDS = 30
_HUBER = 1.345  # standard deviations beyond which a point loses weight (Huber 1964: 95 % efficient on clean data)


@dataclass(frozen=True)
class Point:
    """One size of a curve.

    Attributes:
        bytes: payload, the whole array.
        seconds, fastest, slowest: median and extremes over the repeats; each repeat's time is its slowest rank's.
    """

    bytes: int
    seconds: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Curve:
    """What ``bench_all_reduce`` measured: the points by size, and where and when."""

    ranks: int
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


def bench_all_reduce(sizes: Sequence[int], *, ranks: int, repeats: int = 15) -> Curve:
    """Time the library's all-reduce on real ranks, fp32, one call at a time.

    Before each call the ranks meet in a barrier; the clock runs until the result is there (on CUDA: until the device is
    idle). Rounds go through all sizes in turn, so that a noisy second does not fall on one size alone. A single call
    includes the cost of starting it, which nccl-tests' averages over many calls in flight hide.

    Args:
        sizes: payloads in bytes, each above 0; rounded up to whole fp32 numbers.
        ranks: 2 or more.
        repeats: rounds that count, after two that do not.

    Raises:
        ValueError: numbers that make no sense.
        course_lib.launch.RankFailed, course_lib.launch.RanksHung: as ``launch``.
    """
    check_counts(repeats=repeats)
    for size in sizes:
        positive(size=size)
    if not len(sizes) or ranks < 2:
        raise ValueError(f"sizes={sizes!r}, ranks={ranks!r}: give payloads in bytes, and at least 2 ranks.")
    payloads = sorted({-(-int(size) // _ITEM) * _ITEM for size in sizes})
    run = launch(_time_all, payloads, repeats, ranks=ranks, threads=1, quiet=True, timeout=600)
    points = tuple(
        Point(payload, statistics.median(times), min(times), max(times))
        for payload, times in zip(payloads, run.results[0], strict=True)
    )
    return Curve(ranks, points, stamp(ranks=ranks, backend=run.stamp["backend"]))


def _time_all(payloads: list[int], repeats: int, warm_up: int = 2) -> list[list[float]]:
    """In a rank. Returns for each payload the seconds of the slowest rank, by repeat."""
    import torch
    import torch.distributed as dist

    device = rank_device()
    # zeros, not ones: an all-reduce in place doubles what it finds each time, and inf may take another path
    arrays = [torch.zeros(payload // _ITEM, device=device) for payload in payloads]
    times = torch.zeros(len(arrays), repeats, dtype=torch.float64, device=device)
    for turn in range(-warm_up, repeats):
        for i, array in enumerate(arrays):
            dist.barrier()
            if array.is_cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            dist.all_reduce(array)
            if array.is_cuda:
                torch.cuda.synchronize()
            if turn >= 0:
                times[i, turn] = time.perf_counter() - began
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


@dataclass(frozen=True)
class Fit:
    """seconds = alpha + beta * bytes.

    Attributes:
        alpha: seconds that an all-reduce costs whatever its size.
        beta: seconds per byte of payload.
        residuals: (measured - fitted) / fitted, one a size, without unit.
    """

    alpha: float
    beta: float
    residuals: tuple[float, ...]

    @property
    def bandwidth(self) -> float:
        """1 / beta, bytes/s: the algorithm bandwidth that large sizes approach; inf where no size mattered."""
        return 1 / self.beta if self.beta else math.inf

    @property
    def half_size(self) -> float:
        """Bytes at which latency and transfer cost the same (n_1/2 of Hockney 1994), half the full bandwidth.

        Below it a collective is latency-bound, above it bandwidth-bound. inf where no size mattered.
        """
        return self.alpha / self.beta if self.beta else math.inf

    def predict(self, num_bytes: float) -> float:
        """Seconds of a collective of that payload."""
        return self.alpha + self.beta * num_bytes

    def __str__(self) -> str:
        off = [abs(residual) for residual in self.residuals]
        return (
            f"{self.alpha * 1e6:,.0f} us + bytes / ({self.bandwidth / 1e9:.2f} GB/s); as much latency as transfer "
            f"at {nice_bytes(self.half_size)}; residuals: typical {statistics.median(off):.0%}, largest {max(off):.0%}"
        )


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Weighted least squares of the relative error, robust: a point far off the line loses weight (Huber 1964).

    Plain least squares would look at the largest sizes alone, for there a percent is more seconds than all of the
    latency. Here every size counts alike, and a few that a busy machine delayed count less. Neither alpha nor beta
    comes out below 0.

    Args:
        sizes: payloads in bytes, at least two different ones; a size may come more than once.
        seconds: of each.
    """
    if len(set(sizes)) < 2:
        raise ValueError("A line through one size is no line: give at least two different sizes.")
    s, measured = np.array(sizes, float), np.array(seconds, float)
    fitted, trust = measured, np.ones_like(measured)
    for _ in range(_ROUNDS):
        alpha, beta = _line(s, measured, np.sqrt(trust) / fitted)
        fitted = alpha + beta * s
        off = np.abs(measured / fitted - 1)
        spread = 1.4826 * np.median(off)  # of a normal distribution: its standard deviation
        if spread < 1e-12:
            break
        trust = np.minimum(1, _HUBER * spread / np.maximum(off, 1e-300))
    return Fit(float(alpha), float(beta), tuple(map(float, measured / fitted - 1)))


def _line(s: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """(alpha, beta), neither below 0, that make the sum of (weight * error) ** 2 smallest."""
    beta, alpha = np.polyfit(s, seconds, 1, w=weights)
    if beta <= 0:
        return np.average(seconds, weights=weights**2), 0.0
    if alpha < 0:  # then the best line through the origin
        return 0.0, np.dot(weights * s, weights * seconds) / np.dot(weights * s, weights * s)
    return alpha, beta
