"""The planner: how long its searches take, and how far its figures are from those that people published.

    python benchmarks/planner.py [--repeats 5] [--rows]

Four tables: seconds of a search; step times predicted and published, the rows that the constants were chosen on and those
that were held out apart (tests/published/step_times.json); utilisation, and the place of each published grid in its own
question, in which its authors' software could choose, and in the open question (tests/published/trainings.json); and the
practitioners' procedure against the exhaustive search. Nothing here runs on a GPU: published figures are others' measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from course_lib.collectives.links import Link
from course_lib.memory import flops_per_token
from course_lib.parallel.grid import Grid
from course_tools.planning import (
    MFU_DEFINITION,
    Answer,
    NoPlan,
    Plan,
    Settings,
    check_settings,
    machines,
    plan,
    procedure,
)
from course_tools.planning.constants import CONSTANTS, Constants
from course_tools.planning.question import question
from course_tools.planning.search import Search, measured

PUBLISHED = Path(__file__).parents[1] / "tests" / "published"
SEARCHES = {
    "llama-2-7b on rtx4090": ("llama-2-7b", "rtx4090", 16, 512),
    "llama-3.1-8b on 2x24GiB": ("llama-3.1-8b", "2x24GiB", 16, 2048),
    "llama-3.1-8b on 8xh100-80gb": ("llama-3.1-8b", "8xh100-80gb", 64, 4096),
    "llama-3.1-70b on 8x8xh100-80gb": ("llama-3.1-70b", "8x8xh100-80gb", 256, 4096),
    "llama-3.1-405b on 2048x8xh100-80gb": ("llama-3.1-405b", "2048x8xh100-80gb", 2048, 8192),
}
PROCEDURES = {
    "llm-jp-13b, 96 A100-40GB": ("llm-jp-13b", "12x8xa100-40gb", 1536, 2048),
    "gpt3-175b, 392 A100-40GB": ("gpt3-175b", "49x8xa100-40gb", 1536, 2048),
    "llama-2-70b, 64 A100-80GB": ("llama-2-70b", "8x8xa100-80gb", 1024, 4096),
    "llama-3.1-8b, 8 A100-80GB": ("llama-3.1-8b", "8xa100-80gb", 128, 4096),
    "llama-3.1-405b, 16,384 H100": ("llama-3.1-405b", "2048x8xh100-80gb", 2048, 8192),
}
SAME_TOOLS = {"strategies": ("zero1", "single"), "offload": "none", "axes": ("dp", "tp", "pp")}
FAR = 200  # plans of an open question


class StepTime(NamedTuple):
    """A row of step_times.json, and what the planner says of the same settings. `error`: of tokens a second; + too fast."""

    row: dict[str, Any]
    plan: Plan

    @property
    def error(self) -> float:
        return self.plan.tokens_per_second / self.plan.gpus / self.row["tokens_per_second"] - 1


def step_times(constants: Constants = CONSTANTS) -> list[StepTime]:
    """Every row that is held to a prediction; why the others are not stands in them."""
    found = []
    for row in json.loads((PUBLISHED / "step_times.json").read_text(encoding="utf-8")):
        if row["left_out"]:
            continue
        links = {
            name: Link(**value, source=row["source"]) if isinstance(value, dict) else value
            for name, value in row.get("links", {}).items()
        }
        settings, precision = row["settings"], row["asked"]["precision"]
        asked = question(
            row["model"],
            machines(row["machines"], **links),
            methods=settings.get("method", "full"),
            constants=constants,
            **row["asked"],
        )
        found.append(StepTime(row, measured(asked, Settings(**settings, precision=precision))[0]))
    return found


class Training(NamedTuple):
    """A row of trainings.json: who trained what on what, and which grid they chose.

    `asked` are arguments of `plan`: what their software could do. `fixed` is what else they print (see `Search`), `percent`
    their utilisation of the card's dense 16-bit peak, `counted` how they count FLOPs (see `flops_per_token`).
    """

    id: str
    source: str
    model: str
    machines: str
    global_batch: int
    seq_len: int
    grid: Grid
    asked: dict[str, Any]
    fixed: dict[str, Any]
    percent: float | None
    counted: dict[str, Any]

    def predicted(self) -> Plan:
        """The planner's figures for their grid, in the fastest variant of it that fits."""
        batch = {"global_batch": self.global_batch, "seq_len": self.seq_len, "headroom": 0.0}
        made = Search(question(self.model, self.machines, **batch, **self.asked), 0, self.grid, self.fixed).fastest()
        assert made is not None, f"no variant of {self.grid} fits {self.machines}"
        return made

    def percent_of(self, made: Plan) -> float:
        """A plan's utilisation, in percent, counted as they count."""
        each = flops_per_token(made.model, self.seq_len, **self.counted)
        return 100 * each * made.tokens_per_second / made.gpus / made.machines.card.peak_flops


def trainings() -> Iterator[Training]:
    for row in json.loads((PUBLISHED / "trainings.json").read_text(encoding="utf-8")):
        yield Training(**row | {"grid": Grid(**row["grid"])})


def spread(errors: list[float]) -> str:
    """How wide errors scatter, and to which side."""
    sizes = sorted(map(abs, errors))
    return (
        f"{len(errors):>4} rows: median error {statistics.median(sizes):.1%}, nine of ten within "
        f"{sizes[int(0.9 * (len(sizes) - 1))]:.0%}; median {statistics.median(errors):+.1%}, {sum(e > 0 for e in errors)} too fast"
    )


def published_step_times(rows: bool) -> None:
    """Errors of both parts, and by source."""
    print("\nstep times: predicted tokens a second over published ones, less 1")
    found = step_times()
    for part, held in (("constants were chosen on these", False), ("held out", True)):
        these = [one for one in found if one.row["held_out"] is held]
        print(f"{part:32}{spread([one.error for one in these])}")
        sources: dict[str, list[float]] = {}
        for one in these:
            sources.setdefault(one.row["id"].partition(":")[0], []).append(one.error)
            if rows:
                print(f"  {one.row['id']:52}{one.row['tokens_per_second']:>10,.0f}{one.error:>+8.1%}  {one.plan}")
        print(
            "  "
            + ", ".join(f"{name} {statistics.median(errors):+.0%} ({len(errors)})" for name, errors in sources.items())
        )


def searches(repeats: int) -> None:
    """Wall and CPU seconds of one search each: the first one in this process, and the median of the next ones."""
    print(f"\n{'search':38}{'settings':>9}{'estimated':>10}{'first, ms':>11}{'median, ms':>11}{'CPU, ms':>9}")
    for name, (model, cluster, batch, length) in SEARCHES.items():
        wall, spent = [], []
        for _ in range(repeats + 1):
            started, cpu = time.perf_counter(), time.process_time()
            answer = plan(model, cluster, global_batch=batch, seq_len=length, methods=("full", "lora", "qlora"))
            wall.append(1e3 * (time.perf_counter() - started))
            spent.append(1e3 * (time.process_time() - cpu))
        print(
            f"{name:38}{answer.searched:>9,}{answer.estimated:>10,}{wall[0]:>11.1f}{statistics.median(wall[1:]):>11.1f}"
            f"{statistics.median(spent[1:]):>9.1f}"
        )


def published_grids() -> None:
    """Predicted utilisation against the published one, and the places of the published grids."""
    print(
        f"\n{'training':26}{'published':>10}{'predicted':>10}{'points':>8}{'own rank':>10}{'open rank':>11}  slower than its own best"
    )
    for case in trainings():
        asked = {"global_batch": case.global_batch, "seq_len": case.seq_len, "keep": FAR}
        ours = case.predicted()
        own = plan(case.model, case.machines, **asked, **case.asked)
        open_question = plan(case.model, case.machines, **asked, methods=case.asked.get("methods", ("full",)))
        percent = case.percent_of(ours)
        points = "" if case.percent is None else f"{percent - case.percent:+.1f}"
        slower = ours.step_seconds / min(found.step_seconds for found in own.plans) - 1
        print(
            f"{case.id:26}{'' if case.percent is None else case.percent:>10}{'' if case.percent is None else f'{percent:.1f}':>10}"
            f"{points:>8}{_place(own, ours):>10}{_place(open_question, ours):>11}  {slower:.1%}"
        )
    print(f"A plan's own figure is {MFU_DEFINITION}.")


def _place(answer: Answer, ours: Plan) -> str:
    """Among the grids of an answer, by their speed, that of a plan."""
    faster = {one.grid for one in answer.plans if one.step_seconds < ours.step_seconds} - {ours.grid}
    return f"{len(faster) + 1} of {len({one.grid for one in answer.plans})}"


def procedures() -> None:
    """The procedure of practitioners, ZeRO-1, against all that its tools can do, and against all there is."""
    print(f"\n{'procedure':30}{'tried':>6}{'same tools':>12}{'all tools':>11}  ends in")
    for name, (model, cluster, batch, length) in PROCEDURES.items():
        asked = {"global_batch": batch, "seq_len": length}
        try:
            found = procedure(model, cluster, **asked)
        except NoPlan as nothing:
            print(f"{name:30} {nothing}")
            continue
        same, whole = (plan(model, cluster, **asked, methods="full", **more).plans for more in (SAME_TOOLS, {}))
        ratios = [found.plan.step_seconds / min(one.step_seconds for one in plans) - 1 for plans in (same, whole)]
        print(f"{name:30}{len(found.tried):>6}{ratios[0]:>+12.1%}{ratios[1]:>+11.1%}  {found.plan}")


def main() -> None:
    """Print all tables and what they were made on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", action="store_true", help="every published step time")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}")
    searches(given.repeats)
    published_step_times(given.rows)
    published_grids()
    print("\nThe 175B row of the talk (ZeRO-DP 2, PP 49, TP 2 on 392 A100):")
    talk = {"global_batch": 1536, "seq_len": 2048, "strategy": "zero1", "dp": 2, "pp": 49, "tp": 2}
    print(*check_settings("gpt3-175b", "49x8xa100-40gb", **talk).wrong, sep="\n")
    procedures()


if __name__ == "__main__":
    main()
