"""Many settings at once, as columns of numbers: what the search reckons with, and one `Settings` out of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from course_tools.planning.answer import Settings

CHECKPOINTING = ("none", "selective", "full")


class Way(NamedTuple):
    """Method, strategy and offload: what does not depend on the grid."""

    method: str
    strategy: str
    offload: str


@dataclass(frozen=True, eq=False)
class Table:
    """Settings in columns of equal length, but for `ways` and `grids`, which `way` and `grid` point into.

    Attributes:
        ways: the different ways. grids: the different grids, (dp, tp, pp, cp).
        way, grid: indices. b: micro-batch. m: micro-batches. v: chunks. kept: index of CHECKPOINTING. split: sequence
            parallelism.
    """

    ways: list[Way]
    grids: list[tuple[int, int, int, int]]
    way: np.ndarray
    grid: np.ndarray
    b: np.ndarray
    m: np.ndarray
    v: np.ndarray
    kept: np.ndarray
    split: np.ndarray

    def __len__(self) -> int:
        return len(self.way)

    def axis(self, which: int) -> np.ndarray:
        """dp, tp, pp or cp of each row: 0 to 3."""
        return np.array([grid[which] for grid in self.grids])[self.grid]

    def only(self, wanted: np.ndarray) -> Table:
        """The rows where `wanted` is True."""
        columns = (self.way, self.grid, self.b, self.m, self.v, self.kept, self.split)
        return Table(self.ways, self.grids, *(column[wanted] for column in columns))

    def settings(self, row: int, precision: str) -> Settings:
        way, (dp, tp, pp, cp) = self.ways[self.way[row]], self.grids[self.grid[row]]
        return Settings(
            way.strategy, way.method, dp, tp, pp, cp, bool(self.split[row]), int(self.b[row]), int(self.m[row]),
            int(self.v[row]), CHECKPOINTING[self.kept[row]], way.offload, precision,
        )  # fmt: skip


def table_of(settings: list[Settings]) -> Table:
    """The other way round: a row for each."""
    ways = list(dict.fromkeys(Way(one.method, one.strategy, one.offload) for one in settings))
    grids = list(dict.fromkeys((one.dp, one.tp, one.pp, one.cp) for one in settings))
    rows = [
        (ways.index(Way(one.method, one.strategy, one.offload)), grids.index((one.dp, one.tp, one.pp, one.cp)),
         one.micro_batch, one.micro_batches, one.chunks, CHECKPOINTING.index(one.checkpointing), one.sequence_parallel)
        for one in settings
    ]  # fmt: skip
    return Table(ways, grids, *(np.array(column) for column in zip(*rows, strict=True)))
