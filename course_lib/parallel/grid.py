"""The rank grid: which ranks form a group along which axis. It is ``arange(ranks).reshape(pp, dp, cp, tp)`` and no more.

The slowest axis stands first, so that neighbours in rank, which share a machine, are neighbours along the last axis, tp.
This is Megatron-core's default order ("tp-cp-ep-dp-pp", written there with the fastest first).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from course_lib.choices import AXES
from course_lib.validation import check_counts, pick


@dataclass(frozen=True)
class Grid:
    """Ranks along data, pipeline, tensor and context parallelism; an axis of one rank is not used."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        check_counts(dp=self.dp, pp=self.pp, tp=self.tp, cp=self.cp)

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each of `course_lib.choices.AXES`, the slowest first: what ``init_device_mesh`` takes."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(self.shape)

    def groups(self, axis: str) -> list[list[int]]:
        """The groups along an axis: lists of ranks that differ in nothing else, in the order of their first rank."""
        pick("axis", axis, AXES)
        ranks, index = np.arange(self.size).reshape(self.shape), AXES.index(axis)
        return np.moveaxis(ranks, index, -1).reshape(-1, self.shape[index]).tolist()

    def nodes(self, axis: str, per_node: int) -> int:
        """Machines of `per_node` ranks that the widest group along an axis touches; 1: it never leaves a machine."""
        return max(len({rank // per_node for rank in group}) for group in self.groups(axis))

    def __str__(self) -> str:
        return " x ".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "of one rank"
