"""The rank grid, which is ``arange(ranks).reshape(pp, dp, cp, tp)``.

The slowest axis stands first, so that neighbours in rank, which share a machine, are neighbours along the last axis, tp.
This is Megatron-core's default order ("tp-cp-ep-dp-pp", written there with the fastest first).
"""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.choices import AXES
from course_lib.validation import check_counts


@dataclass(frozen=True)
class Grid:
    """Ranks along data, pipeline, tensor and context parallelism; an axis of one rank is not used.

    `ep` is no axis of its own: so many neighbours along the data axis hold one copy of a mixture's experts together.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        check_counts(dp=self.dp, pp=self.pp, tp=self.tp, cp=self.cp, ep=self.ep)
        if self.dp % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp={self.dp}: expert-parallel ranks are data-parallel ones."
            )

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp * self.pp * self.tp * self.cp

    def __str__(self) -> str:
        return " x ".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "of one rank"
