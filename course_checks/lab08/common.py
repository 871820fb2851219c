"""What the checks of lab 8 share: the lab itself, tolerances, the groups of 4, 2 and 1 ranks that one launch serves."""

from __future__ import annotations

import functools
from typing import Any

from course_checks.harness import Lab

lab = Lab("08_3d_parallelism", title="Tensor, pipeline and 3D parallelism")

RANKS, SIZES = 4, (4, 2, 1)  # one launch of four ranks; in it groups of four, of two neighbours, of one


@functools.cache
def my_groups() -> dict[int, Any]:
    """On a rank: size -> the process group of that size to which this rank belongs. Made once, by all ranks together."""
    import torch.distributed as dist

    mine = {}
    for size in SIZES:
        for first in range(0, RANKS, size):
            members = list(range(first, first + size))
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine[size] = group
    return mine


def members(rank: int, size: int) -> tuple[int, ...]:
    """The global ranks in the group of that size to which a rank belongs."""
    first = rank - rank % size
    return tuple(range(first, first + size))
