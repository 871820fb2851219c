"""What the checks of lab 5 share: the lab itself, tolerances, a launch, a run's collectives, and sizes in words."""

from __future__ import annotations

from course_checks.harness import Lab

lab = Lab("05_deepspeed_zero", title="DeepSpeed ZeRO")

# Bytes a rank may hold beyond what it is asked to: step counters, padding of each tensor where somebody shards so.
SLACK = 512


def slots(elements: int, ranks: int) -> int:
    """Elements of one rank's slice of a flat vector that is padded until it divides by the ranks."""
    return -(-elements // ranks)
