"""What the checks of lab 8 share: the lab itself, and groups of 4, 2 and 1 ranks that one launch serves."""

from __future__ import annotations

import torch.distributed as dist

from course_checks.harness import Lab

lab = Lab("08_3d_parallelism", title="Tensor, pipeline and 3D parallelism")

RANKS, SIZES = 4, (4, 2, 1)


def my_groups() -> list[dist.ProcessGroup]:
    """The groups of each of SIZES to which this rank belongs, two being no neighbours. Every rank must call it."""
    groups = []
    for size in SIZES:
        every = [dist.new_group(range(first, RANKS, RANKS // size)) for first in range(RANKS // size)]
        groups.append(every[dist.get_rank() % len(every)])
    return groups
