"""What the checks of lab 1 share: the lab itself, numbers that learners hand in, and finding the slips in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from course_checks.harness import Lab

lab = Lab("01_gpu_memory", title="Out of memory")

Slips = frozenset[str]
NO_SLIP: Slips = frozenset()


def far(yours: Sequence[float], truth: Sequence[float], *, rtol: float = 0.0, atol: float = 0.0) -> list[int]:
    """Where the two differ by more than the tolerance."""
    pairs = enumerate(zip(yours, truth, strict=True))
    return [i for i, (mine, wanted) in pairs if not math.isclose(mine, wanted, rel_tol=rtol, abs_tol=atol)]


def factor(yours: Sequence[float], truth: Sequence[float], sentences: Mapping[float, str]) -> str | None:
    """The sentence of the factor by which every answer is off, or None."""
    for times, sentence in sentences.items():
        if not far(yours, [times * wanted for wanted in truth], rtol=1e-6):
            return sentence
    return None


def gib(num_bytes: float) -> str:
    """Bytes for a sentence: '18.9 GiB', '350 MiB' or '4,096 bytes'."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes:,.0f} bytes"
