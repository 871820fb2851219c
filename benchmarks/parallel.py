"""Tensor, pipeline and 3D parallelism on CPU ranks over gloo, against their formulas and one rank's losses.

1. The bubble of every pipeline schedule on 4 ranks, with stages paced by a clock (equal work) against its formula, and beside
   it the stages' own speed, which on fewer cores than ranks says how the machine shares them, and not what the schedule costs.
2. Losses of 2 x 2 x 2 (data, pipeline, tensor) on 8 ranks, and of other grids on 4, against one rank on the whole batch.
3. Tensor parallelism by hand and by DTensor on 2 ranks: losses, elements a rank, collectives and bytes a step.

    python benchmarks/parallel.py [--part N ...] [--pace SECONDS] [--steps N]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

RANKS, MICRO_BATCHES, LIMIT, LOSS = 4, 8, 0.15, 1e-5
PACED_STEPS = 6  # of which the fastest counts: a moment in which the machine was elsewhere is not the schedule's
SCHEDULES: dict[str, dict[str, Any]] = {
    "naive": {"schedule": "naive"},
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "1f1b, by hand": {"schedule": "1f1b", "implementation": "hand"},
    "interleaved, 2 chunks": {"schedule": "interleaved", "virtual_stages": 2},
    "zero_bubble": {"schedule": "zero_bubble"},
}
GRIDS = {
    "2 x 2 x 2": dict(dp=2, pp=2, tp=2),
    "2 x 2 x 2, DDP": dict(dp=2, pp=2, tp=2, shard_data=False),
    "dp 2, pp 2": dict(dp=2, pp=2, tp=1),
    "dp 2, tp 2": dict(dp=2, pp=1, tp=2),
    "pp 2, tp 2": dict(dp=1, pp=2, tp=2),
}


def run_all(program: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On a rank: one training program, once a case."""
    import gc
    import importlib

    import torch

    torch.set_num_threads(1)
    module, found = importlib.import_module(f"course_lib.training.{program}"), {}
    for name, settings in cases.items():
        found[name] = module.train(**settings)
        gc.collect()
    return found


def trained(program: str, cases: dict[str, dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    from course_lib.launch import launch

    return launch(run_all, program, cases, ranks=ranks, quiet=True, timeout=600).results


def off(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def bubbles(pace: float, steps: int) -> dict[str, bool]:
    from course_lib.launch import launch
    from course_lib.parallel.schedules import ideal_bubble
    from course_lib.training import single

    sizes = dict(global_batch=MICRO_BATCHES, num_microbatches=MICRO_BATCHES, seq_len=16, layers=8, hidden=32)
    paced = {  # a chunk is a part of the stage, and takes a part of its time; naive alone takes too long for many steps
        name: how
        | sizes
        | {"pace": pace / how.get("virtual_stages", 1), "steps": 3 if name == "naive" else PACED_STEPS}
        for name, how in SCHEDULES.items()
    }
    slow = trained("pipeline", paced, RANKS)
    own = trained("pipeline", {name: how | sizes | {"steps": steps} for name, how in SCHEDULES.items()}, RANKS)
    full = dict(steps=steps, global_batch=MICRO_BATCHES, num_microbatches=MICRO_BATCHES)
    same = trained(
        "pipeline", {name: how | full for name, how in SCHEDULES.items() if "virtual_stages" not in how}, RANKS
    )[0]
    oracle = launch(single.train, ranks=1, quiet=True, steps=steps, global_batch=MICRO_BATCHES).results[0].losses
    print(
        f"{RANKS} stages, {MICRO_BATCHES} micro-batches; the fastest of {PACED_STEPS - 2} steps (naive: 1), a forward of {pace * 1e3:g} ms a stage"
    )
    print(f"  {'':23}{'formula':>9}{'paced':>9}{'off':>8}{'own speed':>11}   micro-batches held, by rank")
    worst = 0.0
    for name, how in SCHEDULES.items():
        told = ideal_bubble(how["schedule"], RANKS, MICRO_BATCHES, how.get("virtual_stages", 1))
        seen = slow[0][name].extra["bubble"]
        worst = max(worst, abs(seen / told - 1))
        held = ", ".join(f"{outcomes[name].extra['in_flight']:g}" for outcomes in slow)
        print(f"  {name:23}{told:9.3f}{seen:9.3f}{seen / told - 1:+8.1%}{own[0][name].extra['bubble']:11.3f}   {held}")
    losses = max(off(outcome.losses, oracle) for outcome in same.values())
    return {
        f"bubble of every schedule within {LIMIT:.0%} of its formula (worst {worst:.1%})": worst <= LIMIT,
        f"losses of {len(same)} pipelines within {LOSS:g} of one rank's (worst {losses:.1e})": losses <= LOSS,
    }


def grids(steps: int) -> dict[str, bool]:
    from course_lib.launch import launch
    from course_lib.training import single

    oracle = launch(single.train, ranks=1, quiet=True, steps=steps).results[0].losses
    found: dict[str, tuple[Any, int]] = {}
    for ranks in (8, 4):
        cases = {n: how | {"steps": steps} for n, how in GRIDS.items() if how["dp"] * how["pp"] * how["tp"] == ranks}
        results = trained("three_d", cases, ranks)
        found |= {name: (results[0][name], max(r[name].extra["local_elements"] for r in results)) for name in cases}
    print(f"one rank: {oracle[0]:.6f} at the first step, {oracle[-1]:.6f} at step {steps}")
    print(f"  {'':23}{'ranks':>6}{'largest difference':>20}{'elements, fullest rank':>24}")
    worst = 0.0
    for name, (outcome, elements) in found.items():
        difference = off(outcome.losses, oracle)
        worst = max(worst, difference)
        print(f"  {name:23}{outcome.world_size:6}{difference:20.1e}{elements:24,}")
    return {
        f"losses of {len(found)} grids within {LOSS:g} of one rank's over {steps} steps (worst {worst:.1e})": worst
        <= LOSS
    }


def tensors(steps: int) -> dict[str, bool]:
    from course_lib.launch import launch
    from course_lib.training import single

    oracle = launch(single.train, ranks=1, quiet=True, steps=steps).results[0].losses
    cases = {
        f"{way}{', sequence' * along}": {"implementation": way, "sequence_parallel": along, "steps": steps}
        for along in (False, True)
        for way in ("hand", "dtensor")
    }
    found = trained("tensor_parallel", cases, 2)[0]
    worst = 0.0
    print(
        f"  {'':19}{'largest difference':>20}{'elements a rank':>17}{'KiB a step on the wire':>24}   collectives a step, KiB put in"
    )
    for name, outcome in found.items():
        difference = off(outcome.losses, oracle)
        worst = max(worst, difference)
        share = outcome.extra["local_elements"] / outcome.extra["total_elements"]
        wire = f"{outcome.wire_bytes / 1024:,.0f}" if outcome.wire_bytes is not None else "not counted"
        calls = ", ".join(
            f"{n} {kind} ({size / 1024:,.0f})" for kind, (n, size) in outcome.extra["collectives_per_step"].items()
        )
        print(f"  {name:19}{difference:20.1e}{share:17.1%}{wire:>24}   {calls}")
    return {
        f"losses of {len(found)} ways to cut tensors within {LOSS:g} of one rank's (worst {worst:.1e})": worst <= LOSS
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, nargs="*", default=[], help="numbers of the parts to run; all without it")
    parser.add_argument("--pace", type=float, default=0.2, help="seconds that a stage's forward takes in part 1")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of every run, at least 3")
    asked = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, bool]]] = {
        "bubbles": lambda: bubbles(asked.pace, asked.steps),
        "three axes": lambda: grids(asked.steps),
        "tensors": lambda: tensors(asked.steps),
    }
    wanted = asked.part or list(range(1, len(parts) + 1))
    if asked.pace <= 0 or asked.steps < 3 or not all(1 <= number <= len(parts) for number in wanted):
        parser.error(f"parts are 1 to {len(parts)}, the pace above 0, steps at least 3.")
    import torch

    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs, tiny Llama")
    goals: dict[str, bool] = {}
    for number in wanted:
        title, part = list(parts.items())[number - 1]
        began = time.perf_counter()
        print(f"\n{number}. {title}", flush=True)
        goals |= part()
        print(f"   ({time.perf_counter() - began:.0f} s)", flush=True)
    print()
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
