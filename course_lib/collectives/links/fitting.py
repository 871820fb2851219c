"""Fit alpha and beta to a measured curve, and keep what the line does not explain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.collectives.links.ring import check_payload
from course_lib.validation import positive

_ROUNDS = 30
_HUBER = 1.345  # standard deviations beyond which a point loses weight (Huber 1964: 95 % efficient on clean data)


@dataclass(frozen=True)
class Fit:
    """seconds = alpha + beta * bytes.

    Attributes:
        alpha: seconds that a collective costs whatever its size.
        beta: seconds per byte of payload.
        sizes, seconds: what was fitted, in bytes and seconds.
        residuals: (measured - fitted) / fitted, one a size, without unit.
    """

    alpha: float
    beta: float
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
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
        """Seconds of a collective of that payload. Raises ValueError for bytes below 0."""
        check_payload(num_bytes)
        return self.alpha + self.beta * num_bytes

    def __str__(self) -> str:
        sizes_of_residuals = [abs(residual) for residual in self.residuals]
        typical, largest = statistics.median(sizes_of_residuals), max(sizes_of_residuals)
        return (
            f"{self.alpha * 1e6:,.0f} us + bytes / ({self.bandwidth / 1e9:.2f} GB/s); half of that speed at "
            f"{self.half_size:,.0f} bytes; residuals: typical {typical:.0%}, largest {largest:.0%}"
        )


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Weighted least squares of the relative error, robust: a point far off the line loses weight (Huber 1964).

    Plain least squares would look at the largest sizes alone, for there a percent is more seconds than all of the
    latency. Here every size counts alike, and a few that a busy machine delayed count less. Neither alpha nor beta
    comes out below 0.

    Args:
        sizes: payloads in bytes, each above 0; a size may come more than once.
        seconds: of each.
    """
    if len(sizes) != len(seconds):
        raise ValueError(f"There are {len(sizes)} sizes and {len(seconds)} times: give one time for each size.")
    for size, time in zip(sizes, seconds, strict=True):
        positive(size=size, seconds=time)
    if len(set(sizes)) < 2:
        raise ValueError("A line through one size is no line: give at least two different sizes.")
    relative = [1 / t for t in seconds]  # weights of the error, not of its square
    alpha, beta = _line(sizes, seconds, relative)
    for _ in range(_ROUNDS):
        fitted = [alpha + beta * s for s in sizes]
        off = [t / f - 1 for t, f in zip(seconds, fitted, strict=True)]
        spread = 1.4826 * statistics.median(map(abs, off))  # of a normal distribution: its standard deviation
        if spread < 1e-12:
            break
        trust = [min(1.0, _HUBER * spread / max(abs(r), 1e-300)) for r in off]
        before = alpha, beta
        alpha, beta = _line(sizes, seconds, [math.sqrt(w) / f for w, f in zip(trust, fitted, strict=True)])
        if math.isclose(alpha, before[0], rel_tol=1e-9) and math.isclose(beta, before[1], rel_tol=1e-9):
            break
    residuals = tuple(t / (alpha + beta * s) - 1 for s, t in zip(sizes, seconds, strict=True))
    return Fit(alpha, beta, tuple(sizes), tuple(seconds), residuals)


def _line(sizes: Sequence[float], seconds: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """(alpha, beta), neither below 0, that make the sum of (weight * error) ** 2 smallest."""
    squares = [w * w for w in weights]
    total = sum(squares)
    mean_size = sum(w * s for w, s in zip(squares, sizes, strict=True)) / total
    mean_time = sum(w * t for w, t in zip(squares, seconds, strict=True)) / total
    spread = sum(w * (s - mean_size) ** 2 for w, s in zip(squares, sizes, strict=True))
    together = sum(w * (s - mean_size) * (t - mean_time) for w, s, t in zip(squares, sizes, seconds, strict=True))
    beta = together / spread
    if beta <= 0:
        return mean_time, 0.0
    alpha = mean_time - beta * mean_size
    if alpha < 0:  # then the best line through the origin
        through = sum(w * s * t for w, s, t in zip(squares, sizes, seconds, strict=True))
        return 0.0, through / sum(w * s * s for w, s in zip(squares, sizes, strict=True))
    return alpha, beta
