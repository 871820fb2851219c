"""The way in which practitioners look for a configuration, step by step, as a search of its own.

Raise data parallelism to the most that fits; then choose between tensor and pipeline parallelism; then try more, smaller
micro-batches; then pay with checkpointing for less tensor and pipeline parallelism. After each try measure, here with the
planner's cost model, and keep the fastest. It looks at a handful of configurations; `plan` looks at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from course_lib.choices import ACTIVATION_CHECKPOINTING, check_choice
from course_lib.memory import Shape
from course_lib.parallel.grid import Grid
from course_tools.planning.answer import NoPlan, Plan, Settings
from course_tools.planning.machines import Machines
from course_tools.planning.question import Question, question
from course_tools.planning.search import measured
from course_tools.planning.space import divisors, micro_batch_sizes, tensor_degrees, way_fault
from course_tools.planning.table import Way


@dataclass(frozen=True)
class Procedure:
    """The `plan` that the procedure ends in, and all that it `tried`, in order, what did not fit as well."""

    plan: Plan
    tried: tuple[Plan, ...]


def procedure(
    model: str | Shape | Any, cluster: str | Machines, *, strategy: str = "zero1", method: str = "full", **choices: Any
) -> Procedure:
    """Look for a configuration as people do.

    Args:
        strategy: how data-parallel ranks share, as of `plan`; the talk that tells the procedure uses ZeRO-1.
        choices: global_batch, seq_len, precision, attention, tokens, constants as of `plan`.
    """
    check_choice("strategy", strategy)
    asked = question(model, cluster, methods=(method,), strategies=(strategy,), **choices)
    tried: list[Plan] = []
    best = _walk(asked, "none", asked.machines.gpus + 1, tried)
    for kind in ACTIVATION_CHECKPOINTING[1:]:  # where checkpointing makes fewer parts possible
        below = best.tp * best.pp if best else asked.machines.gpus + 1
        best = _faster(best, _walk(asked, kind, below, tried))
    if best is None:
        raise NoPlan(
            f"The procedure finds nothing that fits {asked.machines} for {asked.shape.name} by {strategy}: ask plan(), which "
            "knows sharded parameters and offload, too."
        )
    return Procedure(best, tuple(tried))


def _walk(asked: Question, checkpointing: str, below: int, tried: list[Plan]) -> Plan | None:
    """The model in as few parts as fit, and fewer than `below`; other splits into as many; other micro-batches."""
    best: Plan | None = None
    for parts in divisors(asked.machines.gpus):
        splits = _splits(asked, parts)
        if parts >= below or best:
            break
        if splits:
            best = _measure(asked, *splits[0], 1, checkpointing, tried)
    if best is None:
        return None
    for tp, pp in _splits(asked, best.tp * best.pp):
        if (tp, pp) != (best.tp, best.pp):
            best = _faster(best, _measure(asked, tp, pp, 1, checkpointing, tried))
    for size in micro_batch_sizes(asked.global_batch // best.dp)[1:]:
        other = _measure(asked, best.tp, best.pp, size, checkpointing, tried)
        if other is None:
            break
        best = _faster(best, other)
    return best


def _splits(asked: Question, parts: int) -> list[tuple[int, int]]:
    """(tp, pp) of a model cut into so many parts, the widest tensor parallelism first: it stays in the machine."""
    dp = asked.machines.gpus // parts
    way = Way(asked.methods[0], asked.strategies[0] if dp > 1 else "single")
    degrees = reversed(tensor_degrees(asked.shape, asked.machines.per_node))
    grids = [Grid(dp=dp, tp=tp, pp=parts // tp) for tp in degrees if parts % tp == 0]
    fit = [grid for grid in grids if grid.pp <= asked.shape.layers and not way_fault(way, grid)]
    return [(grid.tp, grid.pp) for grid in fit if asked.global_batch % dp == 0]


def _measure(asked: Question, tp: int, pp: int, size: int, checkpointing: str, tried: list[Plan]) -> Plan | None:
    """What the planner says of one configuration; None where it does not fit."""
    dp = asked.machines.gpus // (tp * pp)
    chosen = Settings(
        strategy=asked.strategies[0] if dp > 1 else "single",
        method=asked.methods[0],
        dp=dp,
        tp=tp,
        pp=pp,
        sequence_parallel=tp > 1 and asked.seq_len % tp == 0,
        micro_batch_size=size,
        num_microbatches=asked.global_batch // dp // size,
        activation_checkpointing=checkpointing,
        precision=asked.precision,
    )
    made, need = measured(asked, chosen)
    tried.append(made)
    return made if need.fits(asked) else None


def _faster(one: Plan | None, other: Plan | None) -> Plan | None:
    return min((each for each in (one, other) if each), key=lambda each: each.step_seconds, default=None)
