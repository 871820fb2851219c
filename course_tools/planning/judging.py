"""What is wrong with somebody's configuration: a product that is not the number of GPUs, a split that does not divide,
memory that is not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from course_lib.choices import AXES, check_choice, why_not_tensor_parallel
from course_lib.memory import Shape
from course_lib.parallel.grid import Grid
from course_lib.units import GIB
from course_lib.validation import pick
from course_tools.planning.answer import Plan, Refusal, words
from course_tools.planning.machines import Machines
from course_tools.planning.question import Question, question
from course_tools.planning.refusing import refusal
from course_tools.planning.search import NoVariant, Search
from course_tools.planning.space import micro_batch_sizes, way_fault
from course_tools.planning.table import Way

VARIANT = ("micro_batch_size", "virtual_stages", "activation_checkpointing", "sequence_parallel")


@dataclass(frozen=True)
class Verdict:
    """What `check_settings` found.

    Attributes:
        wrong: what is wrong, a sentence each; empty where it runs as it is.
        plan: the fastest variant of the grid that fits; its figures hold for the GPUs that the grid takes. None: none fits.
    """

    wrong: tuple[str, ...]
    plan: Plan | None


def check_settings(
    model: str | Shape | Any,
    cluster: str | Machines,
    *,
    global_batch: int,
    seq_len: int,
    strategy: str,
    method: str = "full",
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    offload: str = "none",
    precision: str | None = None,
    attention: str = "flash",
    headroom: float = 0.0,
    **variant: Any,
) -> Verdict:
    """Check a configuration before it waits in a queue.

    Args:
        model, cluster, global_batch, seq_len, precision, attention, headroom: as of `plan`.
        strategy, method, dp, tp, pp, cp, offload: the configuration.
        variant: micro_batch_size, virtual_stages, activation_checkpointing, sequence_parallel where they are given; what
            is not is chosen.

    >>> check_settings("gpt3-175b", "49x8xa100-40gb", global_batch=1536, seq_len=2048, strategy="zero1", dp=2, pp=49, tp=2).wrong
    """
    check_choice("strategy", strategy)
    check_choice("method", method)
    for name in variant:
        pick("setting", name, VARIANT)
    asked = question(
        model,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        methods=(method,),
        strategies=(strategy,),
        offload=(offload,),
        precision=precision,
        attention=attention,
        optimizers="adamw",
        headroom=headroom,
    )
    grid, gpus = Grid(dp=dp, tp=tp, pp=pp, cp=cp), asked.machines.gpus
    faults = _faults(asked, grid)
    wrong = faults if grid.size == gpus else [_product(grid, gpus), *faults]
    made, tightest = None, None
    if not faults:
        made, tightest = _variant(asked, grid, variant)
    if tightest is not None:
        wrong.append(f"It does not fit, by {tightest.missing / GIB:,.1f} GiB: {tightest.sentence}")
    return Verdict(tuple(wrong), made)


def _product(grid: Grid, gpus: int) -> str:
    axes = " x ".join(str(getattr(grid, axis)) for axis in AXES if getattr(grid, axis) > 1) or "1"
    share = grid.size / gpus
    if share < 1:
        idle = "half of them" if share == 0.5 else f"{gpus - grid.size:,} of them"
        return (
            f"{words(grid)}: {axes} = {grid.size:,}, and there are {gpus:,} GPUs, so {idle} would have nothing to do."
        )
    return f"{words(grid)}: {axes} = {grid.size:,} GPUs are needed, and there are {gpus:,}."


def _faults(asked: Question, grid: Grid) -> list[str]:
    """Sentences about what does not divide, and about a strategy that is none for this grid."""
    shape, tp = asked.shape, grid.tp
    found = [reason] if (reason := why_not_tensor_parallel(shape, tp)) else []
    if tp > asked.machines.per_node:
        found.append(
            f"TP {tp} leaves the node of {asked.machines.per_node} GPUs: its all-reduces would cross the network."
        )
    if grid.pp > shape.layers:
        found.append(f"{shape.name} has {shape.layers} layers, too few for PP {grid.pp}.")
    if asked.seq_len % grid.cp:
        found.append(f"seq_len={asked.seq_len:,} does not divide by CP {grid.cp}.")
    if asked.global_batch % grid.dp:
        found.append(f"global_batch={asked.global_batch:,} does not divide by DP {grid.dp}.")
    fault = way_fault(Way(asked.methods[0], asked.strategies[0], asked.offload[0]), grid)
    return found + ([fault] if fault else [])


def _variant(asked: Question, grid: Grid, fixed: dict[str, Any]) -> tuple[Plan | None, Refusal | None]:
    """The fastest variant that fits; or how far the most frugal one is from it."""
    if "micro_batch_size" in fixed and fixed["micro_batch_size"] not in micro_batch_sizes(
        asked.global_batch // grid.dp
    ):
        each = asked.global_batch // grid.dp
        raise ValueError(
            f"micro_batch_size={fixed['micro_batch_size']}: a rank has {each:,} sequences a step; give a divisor of that up to 8, or one "
            "that is a power of two."
        )
    try:
        found = Search(asked, 0, grid, fixed)
    except NoVariant:
        raise ValueError(
            f"No variant of {words(grid)} has {', '.join(f'{name}={fixed[name]}' for name in sorted(fixed))}: virtual stages "
            "must divide the layers and need micro-batches in rounds of PP, and sequence parallelism needs TP."
        ) from None
    made = found.fastest()
    return made, None if made else refusal(found, found.nearest())
