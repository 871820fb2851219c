"""What is wrong with somebody's configuration: a product that is not the number of GPUs, a split that does not divide,
memory that is not there; and what would do."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from course_tools.planning.search import NoVariant, best_of, measured
from course_tools.planning.space import micro_batch_sizes, way_fault
from course_tools.planning.table import Way

VARIANT = ("micro_batch_size", "virtual_stages", "activation_checkpointing", "sequence_parallel")


@dataclass(frozen=True)
class Verdict:
    """What `check_settings` found.

    Attributes:
        wrong: what is wrong, a sentence each; empty where it runs as it is.
        plan: the fastest variant of the grid that fits; its figures hold for the GPUs that the grid takes. None: none fits.
        would: what uses all GPUs, fits, and keeps all axes but one, the fastest first.
    """

    wrong: tuple[str, ...]
    plan: Plan | None
    would: tuple[Plan, ...]

    def __str__(self) -> str:
        lines = list(self.wrong) or ["Nothing is wrong with it."]
        if self.wrong and self.would:
            said = [f"{one} ({one.memory_bytes / GIB:,.1f} GiB a GPU)" for one in self.would]
            lines.append(f"What would do: {'; '.join(said)}.")
        return "\n".join(lines)


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

    >>> print(check_settings("gpt3-175b", "49x8xa100-40gb", global_batch=1536, seq_len=2048, strategy="zero1", dp=2, pp=49, tp=2))
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
        short = (tightest.needs - tightest.has) / GIB
        wrong.append(f"It does not fit, by {short:,.1f} GiB: {tightest.sentence}")
    return Verdict(tuple(wrong), made, _would(asked, grid, variant) if wrong else ())


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
        made, found = best_of(asked, grid, **fixed)
    except NoVariant:
        raise ValueError(
            f"No variant of {words(grid)} has {', '.join(f'{name}={fixed[name]}' for name in sorted(fixed))}: virtual stages "
            "must divide the layers and need micro-batches in rounds of PP, and sequence parallelism needs TP."
        ) from None
    if made is not None:
        return made, None
    frugal = found.table.settings(int(found.frugal[0]), asked.precision)
    return None, refusal(asked, frugal, measured(asked, frugal)[1])


def _would(asked: Question, grid: Grid, fixed: dict[str, Any]) -> tuple[Plan, ...]:
    """All axes but one kept, that one so that the product is the number of GPUs."""
    found = []
    for axis in ("tp", "dp", "pp"):
        rest = grid.size // getattr(grid, axis)
        if asked.machines.gpus % rest:
            continue
        other = replace(grid, **{axis: asked.machines.gpus // rest})
        if _faults(asked, other):
            continue
        try:
            made, _ = best_of(
                asked, other, **{name: value for name, value in fixed.items() if name != "virtual_stages"}
            )
        except NoVariant:  # this micro-batch, say, does not go with so many ranks
            continue
        if made is not None:
            found.append(made)
    unique = {one.grid: one for one in found}
    return tuple(sorted(unique.values(), key=lambda one: one.step_seconds))
