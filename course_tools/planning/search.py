"""The search behind `plan`: of the settings that fit, the simplest of those that are about as fast as the fastest.

Every setting is timed, which is quick (`costs`); then, the fastest first, they are held against `course_lib.memory.estimate`
until there are enough. Of a strategy on a grid the variants that need least are looked at first: where they do not fit, none does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from course_lib.choices import ACTIVATION_CHECKPOINTING
from course_lib.parallel.grid import Grid
from course_tools.planning.answer import Plan, Settings
from course_tools.planning.constants import NINE_OF_TEN_WITHIN
from course_tools.planning.costs import model_flops, step_parts
from course_tools.planning.files import targets_of
from course_tools.planning.fit import Needs, needs
from course_tools.planning.limits import limit_of
from course_tools.planning.question import Question
from course_tools.planning.space import table as whole_space
from course_tools.planning.table import Table, Way, table_of, way_of

DAY = 86_400  # seconds
# Steps that differ by less than a third are alike: nine of ten published ones are predicted within NINE_OF_TEN_WITHIN.
ALIKE = 1 / 3
assert ALIKE > NINE_OF_TEN_WITHIN
VARIANTS_ALIKE = 0.02  # variants of one plan share most of that error
SLACK = 0.01  # a variant may need so much less than the one that keeps least
EFFORT = {"single": 0, "ddp": 1, "zero1": 2, "zero2": 2.5, "fsdp": 3, "zero3": 3.5}
MORE_EFFORT = {"paged_adamw8bit": 1, "shard": 1, "tp": 8, "cp": 12, "ep": 14, "pp": 16, "all": 8}
UNWRITTEN = 4  # no target writes it: somebody has to program it


def effort(way: Way, grid: Grid) -> float:
    """How much has to be set up, understood and kept running for a plan; only the order means something."""
    used = [name for name in ("tp", "cp", "ep", "pp") if getattr(grid, name) > 1]
    used += [name for name in (way.optimizer, way.offload) if name in MORE_EFFORT]
    used += ["shard"] if way.shard else []
    return EFFORT[way.strategy] + sum(MORE_EFFORT[name] for name in used)


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
        asked: the question. table, parts, times: every setting, its seconds by part, and their sum. order: rows, the fastest
            first. kinds: of each row, a number that variants of one plan share.
        plans: as of `Answer`. checked: row -> what `estimate` says of it.
    """

    def __init__(
        self, asked: Question, keep: int, grid: Grid | None = None, fixed: Mapping[str, Any] | None = None
    ) -> None:
        """Search for `keep` plans of each method; 0 leaves it at the times.

        Args:
            grid: leaves out all others; it need not use the GPUs of the question.
            fixed: micro_batch_size, num_microbatches, virtual_stages, activation_checkpointing, sequence_parallel where they
                are given.
        """
        self.asked = asked
        self.table = whole_space(asked, None if grid is None else [grid])
        if fixed:
            self.table = self.table.only(_same(self.table, fixed))
            if not len(self.table):
                raise NoVariant("No setting of the question has these values together.")
        self.parts = step_parts(asked, self.table)
        self.times = sum(self.parts.values())
        self.order = np.argsort(self.times, kind="stable")
        self.kinds = self.table.way * len(self.table.grids) + self.table.grid
        self.checked: dict[int, Needs] = {}
        found = []
        for method in asked.methods if keep else ():
            plans: list[Plan] = []
            for last_resort in range(3):
                wanted = [way.method == method and self._last_resort(way) == last_resort for way in self.table.ways]
                rows = np.array(wanted, dtype=bool)[self.table.way]
                plans = plans or self._best(self.order[rows[self.order]].tolist(), keep)
            found += [plans] if plans else []
        fastest = min((plans[0].step_seconds for plans in found), default=0.0)
        found.sort(key=lambda plans: (*self.simplicity(plans[0]), plans[0].step_seconds > (1 + ALIKE) * fastest))
        self.plans = [one for plans in found for one in plans]

    def fastest(self) -> Plan | None:
        """The fastest setting that fits."""
        fit = (row for row in self.order.tolist() if self.needs(row).fits(self.asked))
        row = next(fit, None)
        return None if row is None else self.plan(row)

    @cached_property
    def frugal(self) -> dict[int, tuple[int, int]]:
        """Of each kind the rows that keep least, in the smallest micro-batches and in the largest, which are fewest."""
        table = self.table
        found = []
        for b in (table.b, -table.b):
            order = np.lexsort((b, table.v, ~table.split, -table.kept, self.kinds))
            kinds, first = np.unique(self.kinds[order], return_index=True)
            found.append(order[first].tolist())
        return dict(zip(kinds.tolist(), zip(*found, strict=True), strict=True))

    def least(self, kind: int) -> int:
        """The row of a kind that comes nearest to fitting."""
        return min(self.frugal[kind], key=self.share)

    def nearest(self) -> int:
        """The row that comes nearest of all."""
        return min(map(self.least, self.frugal), key=self.share)

    def share(self, row: int) -> float:
        """How much a row needs of the memory that it may take, on the card or on the host, wherever that is more."""
        need, asked = self.needs(row), self.asked
        return max(need.memory.device / asked.room, need.host / asked.machines.host_memory)

    def needs(self, row: int) -> Needs:
        """What `estimate` says of a row."""
        if row not in self.checked:
            self.checked[row] = needs(self.asked, self.table.settings(row, self.asked.precision))
        return self.checked[row]

    def _last_resort(self, way: Way) -> int:
        """What changes the training or needs the host is for what does not fit without: 8-bit states 1, offload 2."""
        return 2 if way.offload != "none" else int(way.optimizer not in (self.asked.optimizers[0], "adamw"))

    def simplicity(self, plan: Plan) -> tuple[float, ...]:
        """What a plan asks for, to be compared: last resorts, then effort."""
        way = way_of(plan)
        return self._last_resort(way), effort(way, plan.grid) + self._unwritten(plan)

    def _unwritten(self, plan: Plan) -> int:
        return 0 if targets_of(plan, base_model="a model") else UNWRITTEN

    def _best(self, rows: list[int], keep: int) -> list[Plan]:
        """`rows`, fastest first: those of which there are enough, in groups whose times are alike, the simplest first."""
        table = self.table
        efforts: dict[tuple, float] = {}  # of what is there already: anything later and no simpler has no use
        groups: list[list[tuple[float, float, int]]] = []
        count, seen = 0, set()
        for row in rows:
            kind, seconds = int(self.kinds[row]), float(self.times[row])
            new_group = not groups or seconds > (1 + ALIKE) * groups[-1][0][1]
            if new_group and count >= keep:
                break
            way, grid = table.ways[table.way[row]], table.grids[table.grid[row]]
            cost, family = effort(way, grid), (way.family, grid)
            if kind in seen or efforts.get(family, np.inf) <= cost:
                continue
            if self.share(self.least(kind)) > 1 + SLACK:
                seen.add(kind)
                continue
            if not self.needs(row).fits(self.asked):
                continue
            seen.add(kind)
            efforts[family] = cost
            if new_group:
                groups.append([])
            groups[-1].append((cost + self._unwritten(self.plan(row)), seconds, row))
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
        compile=asked.compile,
    )


def measured(asked: Question, chosen: Settings) -> tuple[Plan, Needs]:
    """What the model says of one setting, whether it fits or not."""
    table: Table = table_of([chosen])
    parts = {name: float(seconds[0]) for name, seconds in step_parts(asked, table).items()}
    need = needs(asked, chosen)
    return made_plan(asked, chosen, need, parts), need
