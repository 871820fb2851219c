"""What the checks of lab 5 share: the lab itself, tolerances, a launch, a run's collectives, and sizes in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from course_checks.harness import Lab

lab = Lab("05_deepspeed_zero", title="DeepSpeed ZeRO")

# Bytes a rank may hold beyond what it is asked to: step counters, padding of each tensor where somebody shards so.
SLACK = 512


def slots(elements: int, ranks: int) -> int:
    """Elements of one rank's slice of a flat vector that is padded until it divides by the ranks."""
    return -(-elements // ranks)


Slips = frozenset[str]
NO_SLIP: Slips = frozenset()


def far(yours: Sequence[float], truth: Sequence[float], *, rtol: float = 0.0, atol: float = 0.0) -> list[int]:
    """Where the two differ by more than the tolerance."""
    pairs = enumerate(zip(yours, truth, strict=True))
    return [i for i, (mine, wanted) in pairs if not math.isclose(mine, wanted, rel_tol=rtol, abs_tol=atol)]


def gib(num_bytes: float) -> str:
    """Bytes for a sentence: '18.9 GiB', '350 MiB' or '4,096 bytes'."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes:,.0f} bytes"
