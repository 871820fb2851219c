"""The planner: how long its searches take, and how far its figures are from those that people published.

    python benchmarks/planner.py [--repeats 5]

Four tables: seconds of a search (medians, all methods and axes open); utilisation predicted and published, with one set of
constants; the place of each published grid in its own question (grids are ranked, not their variants: micro-batch,
checkpointing and chunks are each grid's best) and in the open question, with all that is possible today; and the
practitioners' procedure against the exhaustive search. Nothing here runs on a GPU: published figures are others' measurements.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

from course_tools.planning import MFU_DEFINITION, NoPlan, check_settings, plan, procedure
from course_tools.planning.cases import CASES

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
SAME_TOOLS = {"strategies": ("zero1", "single"), "offload": "none", "axes": ("dp", "tp", "pp"), "interleave": False}
FAR = 200  # grids of an open question that are ranked


def searches(repeats: int) -> None:
    """Wall and CPU seconds of one search each: the first one in this process, and the median of the next ones."""
    print(f"\n{'search':38}{'settings':>9}{'estimated':>10}{'first, ms':>11}{'median, ms':>11}{'CPU, ms':>9}")
    for name, (model, cluster, batch, length) in SEARCHES.items():
        wall, spent = [], []
        for _ in range(repeats + 1):
            started, cpu = time.perf_counter(), time.process_time()
            answer = plan(model, cluster, global_batch=batch, seq_len=length)
            wall.append(1e3 * (time.perf_counter() - started))
            spent.append(1e3 * (time.process_time() - cpu))
        print(
            f"{name:38}{answer.searched:>9,}{answer.estimated:>10,}{wall[0]:>11.1f}{statistics.median(wall[1:]):>11.1f}"
            f"{statistics.median(spent[1:]):>9.1f}"
        )


def published() -> None:
    """Predicted utilisation against the published one, and the places of the published grids."""
    print(
        f"\n{'case':26}{'published':>10}{'predicted':>10}{'points':>8}{'own rank':>10}{'open rank':>11}  slower than its own best"
    )
    residuals = []
    for name, case in CASES.items():
        asked = {"global_batch": case.global_batch, "seq_len": case.seq_len, "keep": FAR}
        ours = case.predicted()
        own = plan(case.model, case.machines, **asked, **case.asked)
        methods = case.asked.get("methods", ("full",))
        open_question = plan(case.model, case.machines, **asked, methods=methods)
        percent = case.percent_of(ours)
        residual = "" if case.percent is None else f"{percent - case.percent:+.1f}"
        residuals += [] if case.percent is None else [percent - case.percent]
        slower = ours.step_seconds / min(found.step_seconds for found in own.plans) - 1
        print(
            f"{name:26}{'' if case.percent is None else case.percent:>10}{'' if case.percent is None else f'{percent:.1f}':>10}"
            f"{residual:>8}{_place(own, case):>10}{_place(open_question, case):>11}  {slower:.1%}"
        )
    rms = statistics.fmean(value**2 for value in residuals) ** 0.5
    worst = max(abs(value) for value in residuals)
    print(
        f"{len(residuals)} rows of utilisation: root mean square {rms:.1f} points, worst {worst:.1f}; as each source counts it."
    )
    print(f"A plan's own figure is {MFU_DEFINITION}.")


def _place(answer, case) -> str:
    rank = answer.rank(case.grid)
    return f"{rank or 'beyond'} of {len(answer.grids)}"


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
        print(f"{name:30}{found.measured:>6}{ratios[0]:>+12.1%}{ratios[1]:>+11.1%}  {found.plan}")


def main() -> None:
    """Print all tables and what they were made on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}")
    searches(repeats)
    published()
    print("\nThe 175B row of the talk (ZeRO-DP 2, PP 49, TP 2 on 392 A100):")
    print(
        check_settings(
            "gpt3-175b", "49x8xa100-40gb", global_batch=1536, seq_len=2048, strategy="zero1", dp=2, pp=49, tp=2
        )
    )
    procedures()


if __name__ == "__main__":
    main()
