"""The search behind `plan`: which settings are the fastest of those that fit.

Every setting is timed, which is quick (`costs`); then, the fastest first, those that may fit are held against
`course_lib.memory.estimate` until there are enough. So nothing that is slower than the answer is ever estimated, and
nothing that is faster is left out: `bounds` only removes what cannot fit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from course_lib.choices import ACTIVATION_CHECKPOINTING, OFFLOADS
from course_lib.parallel.grid import Grid
from course_tools.planning.answer import Plan, Settings
from course_tools.planning.bounds import least_bytes
from course_tools.planning.costs import model_flops, step_parts
from course_tools.planning.fit import Needs, needs
from course_tools.planning.limits import limit_of
from course_tools.planning.question import Question
from course_tools.planning.space import table as whole_space
from course_tools.planning.table import Table, table_of

DAY = 86_400  # seconds
ALIKE = 0.01
SIMPLER = {
    "single": 0,
    "ddp": 0,
    "zero1": 1,
    "zero2": 1.25,
    "fsdp": 1.5,
    "zero3": 1.75,
    "none": 0,
    "optimizer": 3,
    "all": 4,
    "full": 0,
    "lora": 0,
    "qlora": 0.5,
}


def best_of(asked: Question, grid: Grid, **fixed: Any) -> tuple[Plan | None, Search]:
    """The fastest variant of one grid that fits, or None; and the search behind it.

    Args:
        grid: need not use the GPUs of the question.
        fixed: micro_batch_size, num_microbatches, virtual_stages, activation_checkpointing, sequence_parallel where they
            are given.
    """
    found = Search(asked, 1, grid=grid, fixed=fixed)
    return (found.plans[0] if found.plans else None), found


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


def _order(table: Table, times: np.ndarray) -> np.ndarray:
    """Rows, the fastest first; of those within ALIKE of each other the simplest, for the model knows no better."""
    class_ = np.floor(np.log(times / times.min()) / np.log(1 + ALIKE))
    ways = np.array([SIMPLER[way.strategy] + SIMPLER[way.offload] + SIMPLER[way.method] for way in table.ways])
    grids = np.array([(grid.tp > 1) + 2 * (grid.pp > 1) + 2 * (grid.cp > 1) for grid in table.grids])
    return np.lexsort((times, ways[table.way] + grids[table.grid], class_))


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
        self.order = _order(self.table, self.times)
        self.checked: dict[int, Needs] = {}
        self.plans, self.grids = self._run(keep, prune)

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

    def _run(self, keep: int, prune: bool) -> tuple[list[Plan], list[Grid]]:
        table, room = self.table, self.asked.machines.card.memory
        order = self.order[self.least[self.order] <= room] if prune else self.order
        methods = [way.method for way in table.ways]
        ways, grids = table.way.tolist(), table.grid.tolist()
        # without offload, or with less of it, a way that is there already is the better one
        family = [(way.method, way.strategy) for way in table.ways]
        offloaded = [OFFLOADS.index(way.offload) for way in table.ways]
        lacking = set(self.asked.methods)  # methods of which there is no plan yet
        seen: dict[tuple, int] = {}
        seen_grids: dict[int, None] = {}
        first: list[int] = []
        for row in order.tolist():
            way, kind = ways[row], (family[ways[row]], grids[row])
            method = methods[way]
            enough = len(first) >= keep and len(seen_grids) >= keep
            if seen.get(kind, len(OFFLOADS)) <= offloaded[way] or (enough and method not in lacking):
                continue
            if self.needs(row).fits(self.asked):
                seen[kind] = offloaded[way]
                seen_grids.setdefault(grids[row])
                if len(first) < keep or method in lacking:
                    first.append(row)
                lacking.discard(method)
                if not lacking and enough:
                    break
        return [self.plan(row) for row in first], [table.grids[grid] for grid in seen_grids][:keep]

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
    )


def measured(asked: Question, chosen: Settings) -> tuple[Plan, Needs]:
    """What the model says of one setting, whether it fits or not."""
    table: Table = table_of([chosen])
    parts = {name: float(seconds[0]) for name, seconds in step_parts(asked, table).items()}
    need = needs(asked, chosen)
    return made_plan(asked, chosen, need, parts), need
