"""The search behind `plan`: which settings are the fastest of those that fit, and among equals the simplest.

Every setting is timed, which is quick (`costs`); then, the fastest first, those that may fit are held against
`course_lib.memory.estimate` until there are enough. So nothing that is much slower than the answer is ever estimated, and
nothing that is faster is left out: `bounds` only removes what cannot fit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from course_lib.choices import ACTIVATION_CHECKPOINTING
from course_lib.parallel.grid import Grid
from course_tools.planning.answer import Plan, Settings
from course_tools.planning.bounds import least_bytes
from course_tools.planning.costs import model_flops, step_parts
from course_tools.planning.fit import Needs, needs
from course_tools.planning.limits import limit_of
from course_tools.planning.question import Question
from course_tools.planning.space import table as whole_space
from course_tools.planning.table import Table, Way, table_of, way_of

DAY = 86_400  # seconds
# Steps that differ by less than a third are alike: the model cannot tell them apart (nine of ten published ones are predicted
# within 29 %), and a third is what people pay for a simpler set-up when they checkpoint whole blocks.
ALIKE = 1 / 3
VARIANTS_ALIKE = 0.02  # variants of one plan share most of that error
EFFORT = {"single": 0, "ddp": 1, "zero1": 2, "zero2": 2.5, "fsdp": 3, "zero3": 3.5}
MORE_EFFORT = {
    "paged_adamw8bit": 1,
    "shard": 1,
    "tp": 8,
    "unwritten": 4,  # no target writes it: somebody has to program it
    "cp": 12,
    "ep": 14,
    "pp": 16,
    "all": 8,
}


def effort(way: Way, grid: Grid) -> float:
    """How much has to be set up, understood and kept running for a plan; only the order means something."""
    used = [name for name in ("tp", "cp", "ep", "pp") if getattr(grid, name) > 1]
    used += [name for name in (way.optimizer, way.offload) if name in MORE_EFFORT]
    used += ["shard"] if way.shard else []
    tensor = grid.tp > 1 and not (way.strategy == "fsdp" and way.method == "full" and not way.shard)
    used += ["unwritten"] if tensor or max(grid.cp, grid.pp, grid.ep) > 1 else []
    return EFFORT[way.strategy] + sum(MORE_EFFORT[name] for name in used)


def best_of(asked: Question, grid: Grid, **fixed: Any) -> tuple[Plan | None, Search]:
    """The fastest variant of one grid that fits, or None; and the search behind it.

    Args:
        grid: need not use the GPUs of the question.
        fixed: micro_batch_size, num_microbatches, virtual_stages, activation_checkpointing, sequence_parallel where they
            are given.
    """
    found = Search(asked, 1, grid=grid, fixed=fixed)
    return min(found.plans, key=lambda one: one.step_seconds, default=None), found


def _same(table: Table, fixed: Mapping[str, Any]) -> np.ndarray:
    columns = {
        "micro_batch_size": table.b,
        "num_microbatches": table.m,
        "virtual_stages": table.v,
        "sequence_parallel": table.split,
    }
    wanted = np.ones(len(table), dtype=bool)
    for name, value in fixed.items():
        if name == "activation_checkpointing":
            wanted &= table.kept == ACTIVATION_CHECKPOINTING.index(value)
        else:
            wanted &= columns[name] == value
    return wanted


class NoVariant(ValueError):
    """Nothing is left to search in."""


class Search:
    """One search, with what it saw on the way.

    Attributes:
        asked: the question. table, parts, times, least: every setting, its seconds by part, their sum, and the bytes that
            it needs at least. order: rows, the fastest first.
        plans, grids: as of `Answer`. checked: row -> what `estimate` says of it. estimated: how many those are.
    """

    def __init__(
        self,
        asked: Question,
        keep: int,
        prune: bool = True,
        grid: Grid | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """Search. `keep` and `prune` as of `plan`; `grid` and `fixed` leave out all others, see `best_of`."""
        self._start = time.perf_counter()
        self.asked = asked
        self.table = whole_space(asked, None if grid is None else [grid])
        if fixed:
            self.table = self.table.only(_same(self.table, fixed))
            if not len(self.table):
                raise NoVariant("No setting of the question has these values together.")
        self.parts = step_parts(asked, self.table)
        self.times = sum(self.parts.values())
        self.least = least_bytes(asked, self.table)
        self.order = np.argsort(self.times, kind="stable")
        self.kinds = self.table.way * len(self.table.grids) + self.table.grid
        self.checked: dict[int, Needs] = {}
        may_fit = self.least <= asked.room if prune else np.ones(len(self.table), dtype=bool)
        self._grids: dict[Grid, float] = {}
        found = []
        for method in asked.methods:
            plans: list[Plan] = []
            for last_resort in range(3):
                wanted = [way.method == method and self._last_resort(way) == last_resort for way in self.table.ways]
                rows = may_fit & np.array(wanted, dtype=bool)[self.table.way]
                plans = plans or self._best(self.order[rows[self.order]].tolist(), keep)
            found.append(plans)
        found.sort(
            key=lambda plans: self._simplicity(plans[0]) if plans else ()
        )  # the method with the simplest best plan
        self.plans = [one for plans in found for one in plans]
        self.grids = sorted(self._grids, key=self._grids.__getitem__)[:keep]

    @cached_property
    def frugal(self) -> np.ndarray:
        """Rows, those that need least first; where the bound is the same, those that keep fewer activations."""
        table = self.table
        return np.lexsort((table.b, table.v, ~table.split, -table.kept, self.least))

    @property
    def estimated(self) -> int:
        return len(self.checked)

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def needs(self, row: int) -> Needs:
        """What `estimate` says of a row."""
        if row not in self.checked:
            self.checked[row] = needs(self.asked, self.table.settings(row, self.asked.precision))
        return self.checked[row]

    def _last_resort(self, way: Way) -> int:
        """What changes the training or needs the host is for what does not fit without: 8-bit states 1, offload 2."""
        return 2 if way.offload != "none" else int(way.optimizer not in (self.asked.optimizers[0], "adamw"))

    def _simplicity(self, plan: Plan) -> tuple[float, ...]:
        way = way_of(plan)
        return self._last_resort(way), effort(way, plan.grid)

    def _best(self, rows: list[int], keep: int) -> list[Plan]:
        """`rows`, fastest first: those of which there are enough, in groups whose times are alike, the simplest first."""
        table = self.table
        efforts: dict[tuple, float] = {}  # of what is there already: anything later and no simpler has no use
        groups: list[list[tuple[float, float, int]]] = []
        count, seen, grids = 0, set(), set()
        for row in rows:
            kind, seconds = int(self.kinds[row]), float(self.times[row])
            new_group = not groups or seconds > (1 + ALIKE) * groups[-1][0][1]
            if new_group and count >= keep and len(grids) >= min(keep, len(table.grids)):
                break
            if kind in seen:
                continue
            way, grid = table.ways[table.way[row]], table.grids[table.grid[row]]
            cost, family = effort(way, grid), (way.family, grid)
            if efforts.get(family, np.inf) <= cost or not self.needs(row).fits(self.asked):
                continue
            seen.add(kind)
            efforts[family] = cost
            if new_group:
                groups.append([])
            groups[-1].append((cost, seconds, row))
            grids.add(grid)
            self._grids[grid] = min(seconds, self._grids.get(grid, np.inf))
            count += 1
        chosen = [row for group in groups for _, _, row in sorted(group)][:keep]
        if chosen and keep > 1 and groups[0][0][2] not in chosen:
            chosen[-1] = groups[0][0][2]  # the fastest is worth seeing, whatever it asks for
        return [self.plan(self._simplest_variant(row)) for row in chosen]

    def _simplest_variant(self, fastest: int) -> int:
        """Of the variants of a plan that are as fast as the fastest, the one with the least to set up."""
        table, limit = self.table, (1 + VARIANTS_ALIKE) * self.times[fastest]
        near = np.flatnonzero(
            (self.kinds == self.kinds[fastest]) & (self.times <= limit) & (self.times >= self.times[fastest])
        )
        for row in near[np.lexsort((self.times[near], table.kept[near], table.v[near]))].tolist():
            if self.needs(row).fits(self.asked):
                return row
        return fastest

    def plan(self, row: int) -> Plan:
        """A row as a plan."""
        return made_plan(
            self.asked,
            self.table.settings(row, self.asked.precision),
            self.needs(row),
            {name: float(seconds[row]) for name, seconds in self.parts.items()},
        )


def made_plan(asked: Question, chosen: Settings, need: Needs, parts: dict[str, float]) -> Plan:
    """Settings with their memory and their seconds by part."""
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0}
    seconds = sum(parts.values())
    card = asked.machines.card
    rate = model_flops(asked, chosen.method) / chosen.grid.size / seconds
    per_step = asked.global_batch * asked.seq_len
    return Plan(
        **{name: getattr(chosen, name) for name in Settings.__dataclass_fields__},
        memory=need.memory,
        host=need.host,
        step_seconds=seconds,
        parts=parts,
        mfu=rate / card.peak_flops,
        days=None if asked.tokens is None else asked.tokens / per_step * seconds / DAY,
        limit=limit_of(asked, chosen, parts),
        model=asked.shape,
        machines=asked.machines,
        global_batch=asked.global_batch,
        seq_len=asked.seq_len,
        tokens=asked.tokens,
        lora_rank=asked.lora_rank,
        attention=asked.attention,
        loss=asked.loss,
    )


def measured(asked: Question, chosen: Settings) -> tuple[Plan, Needs]:
    """What the model says of one setting, whether it fits or not."""
    table: Table = table_of([chosen])
    parts = {name: float(seconds[0]) for name, seconds in step_parts(asked, table).items()}
    need = needs(asked, chosen)
    return made_plan(asked, chosen, need, parts), need
