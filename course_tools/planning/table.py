"""Many settings at once, as columns of numbers: what the search reckons with, and one `Settings` out of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from course_lib.choices import ACTIVATION_CHECKPOINTING
from course_lib.parallel.grid import Grid
from course_tools.planning.answer import Settings


class Way(NamedTuple):
    """What does not depend on the grid. `shard`: FSDP shares a copy of the model among so many ranks; 0, among all."""

    method: str
    strategy: str
    offload: str = "none"
    optimizer: str = "adamw"
    shard: int = 0

    @property
    def family(self) -> tuple[str, str]:
        """Ways of one family are alternatives that cost the same or more; ZeRO-1 and ZeRO-2 are."""
        return self.method, "zero" if self.strategy in ("zero1", "zero2") else self.strategy

    def copies(self, grid: Grid) -> int:
        """Of the model among a grid's data-parallel ranks, each sharded."""
        return max(grid.dp * grid.cp // self.shard, 1) if self.shard else 1


@dataclass(frozen=True, eq=False)
class Table:
    """Settings in columns of equal length, but for `ways` and `grids`, which `way` and `grid` point into.

    Attributes:
        ways: the different ways. grids: the different grids.
        way, grid: indices. b: micro-batch. m: micro-batches. v: virtual stages. kept: index of ACTIVATION_CHECKPOINTING. split: sequence
            parallelism.
    """

    ways: list[Way]
    grids: list[Grid]
    way: np.ndarray
    grid: np.ndarray
    b: np.ndarray
    m: np.ndarray
    v: np.ndarray
    kept: np.ndarray
    split: np.ndarray

    def __len__(self) -> int:
        return len(self.way)

    def axis(self, name: str) -> np.ndarray:
        """Ranks along an axis of each row."""
        return np.array([getattr(grid, name) for grid in self.grids])[self.grid]

    def only(self, wanted: np.ndarray) -> Table:
        """The rows where `wanted` is True."""
        columns = (self.way, self.grid, self.b, self.m, self.v, self.kept, self.split)
        return Table(self.ways, self.grids, *(column[wanted] for column in columns))

    def settings(self, row: int, precision: str) -> Settings:
        way, grid = self.ways[self.way[row]], self.grids[self.grid[row]]
        return Settings(
            strategy=way.strategy,
            method=way.method,
            dp=grid.dp,
            tp=grid.tp,
            pp=grid.pp,
            cp=grid.cp,
            ep=grid.ep,
            sequence_parallel=bool(self.split[row]),
            micro_batch_size=int(self.b[row]),
            num_microbatches=int(self.m[row]),
            virtual_stages=int(self.v[row]),
            activation_checkpointing=ACTIVATION_CHECKPOINTING[self.kept[row]],
            offload=way.offload,
            optimizer=way.optimizer,
            copies=way.copies(grid),
            precision=precision,
        )


def way_of(chosen: Settings) -> Way:
    shard = chosen.dp * chosen.cp // chosen.copies if chosen.copies > 1 else 0
    return Way(chosen.method, chosen.strategy, chosen.offload, chosen.optimizer, shard)


def table_of(settings: list[Settings]) -> Table:
    """The other way round: a row for each."""
    ways = list(dict.fromkeys(map(way_of, settings)))
    grids = list(dict.fromkeys(one.grid for one in settings))
    rows = [
        (
            ways.index(way_of(one)),
            grids.index(one.grid),
            one.micro_batch_size,
            one.num_microbatches,
            one.virtual_stages,
            ACTIVATION_CHECKPOINTING.index(one.activation_checkpointing),
            one.sequence_parallel,
        )
        for one in settings
    ]
    return Table(ways, grids, *(np.array(column) for column in zip(*rows, strict=True)))
