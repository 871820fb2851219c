"""What is wrong with somebody's configuration: a product that is not the number of GPUs, a split that does not divide,
memory that is not there; and what would do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from course_lib.memory import Shape
from course_lib.parallel.grid import Grid
from course_lib.validation import pick
from course_tools.planning.answer import GIB, NoPlan, Plan, Refusal, words
from course_tools.planning.machines import Machines
from course_tools.planning.planner import plan
from course_tools.planning.question import METHODS, STRATEGIES, Question, question
from course_tools.planning.refusing import refusal
from course_tools.planning.search import NoVariant, best_of, measured
from course_tools.planning.space import goes, micro_batches
from course_tools.planning.table import Way

AXES = ("dp", "tp", "pp", "cp")
OTHERS = 3  # plans that are named where the configuration itself cannot be mended along one axis
VARIANT = ("micro_batch", "chunks", "checkpointing", "sequence_parallel")


@dataclass(frozen=True)
class Verdict:
    """What `check_settings` found.

    Attributes:
        wrong: what is wrong, a sentence each; empty where it runs as it is.
        fits: the grid, as it is given, fits the cards in some variant.
        plan: that variant, the fastest; its figures hold for the GPUs that the grid takes. None where nothing fits.
        would: what uses all GPUs, fits, and keeps all axes but one, the fastest first; where nothing does, other plans of the
            same method.
    """

    wrong: tuple[str, ...]
    fits: bool
    plan: Plan | None
    would: tuple[Plan, ...]

    def __str__(self) -> str:
        lines = list(self.wrong) or ["Nothing is wrong with it."]
        if self.wrong and self.would:
            said = [f"{one} ({one.memory_bytes / GIB:,.1f} GiB a GPU)" for one in self.would]
            lines.append(f"What would do: {'; '.join(said)}.")
        return "\n".join(lines)


def check_settings(
    model: str | Shape | Any, cluster: str | Machines, *, global_batch: int, seq_len: int, strategy: str, method: str = "full",
    dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, offload: str = "none", precision: str | None = None,
    attention: str = "flash", **variant: Any,
) -> Verdict:  # fmt: skip
    """Check a configuration before it waits in a queue.

    Args:
        model, cluster, global_batch, seq_len, precision, attention: as of `plan`.
        strategy, method, dp, tp, pp, cp, offload: the configuration.
        variant: micro_batch, chunks, checkpointing, sequence_parallel where they are given; what is not is chosen.

    Raises:
        ValueError: an unknown name, a number below 1.

    >>> print(check_settings("gpt3-175b", "49x8xa100-40gb", global_batch=1536, seq_len=2048, strategy="zero1", dp=2, pp=49, tp=2))
    """
    pick("strategy", strategy, STRATEGIES)
    pick("method", method, METHODS)
    for name in variant:
        pick("setting", name, VARIANT)
    asked = question(
        model, cluster, global_batch=global_batch, seq_len=seq_len, methods=(method,), strategies=(strategy,),
        offload=(offload,), precision=precision, attention=attention,
    )  # fmt: skip
    grid, gpus = Grid(dp=dp, tp=tp, pp=pp, cp=cp), asked.machines.gpus
    wrong = [*_shape_faults(asked, grid), *_way_faults(Way(method, strategy, offload), grid)]
    if grid.size != gpus:
        wrong.insert(0, _product(grid, gpus))
    made, tightest = None, None
    if not _shape_faults(asked, grid) and not _way_faults(Way(method, strategy, offload), grid):
        made, tightest = _variant(asked, grid, variant)
    if tightest is not None:
        short = (tightest.needs - tightest.has) / GIB
        wrong.append(f"It does not fit, by {short:,.1f} GiB: {tightest.sentence}")
    would = _would(asked, grid, variant) if wrong else ()
    if wrong and not would:
        would = _other_ways(asked)
    return Verdict(tuple(wrong), made is not None, made, would)


def _other_ways(asked: Question) -> tuple[Plan, ...]:
    """What fits of the same method, whatever the strategy and the grid."""
    try:
        answer = plan(
            asked.shape, asked.machines, global_batch=asked.global_batch, seq_len=asked.seq_len, methods=asked.methods,
            precision=asked.precision, attention=asked.attention, keep=OTHERS,
        )  # fmt: skip
    except NoPlan:
        return ()
    return tuple(answer.plans)


def _product(grid: Grid, gpus: int) -> str:
    axes = " x ".join(str(getattr(grid, axis)) for axis in AXES if getattr(grid, axis) > 1) or "1"
    share = grid.size / gpus
    if share < 1:
        idle = "half of them" if share == 0.5 else f"{gpus - grid.size:,} of them"
        return (
            f"{words(grid)}: {axes} = {grid.size:,}, and there are {gpus:,} GPUs, so {idle} would have nothing to do."
        )
    return f"{words(grid)}: {axes} = {grid.size:,} GPUs are needed, and there are {gpus:,}."


def _shape_faults(asked: Question, grid: Grid) -> list[str]:
    """Sentences about what does not divide."""
    shape, batch = asked.shape, asked.global_batch
    found = []
    for what, size in (("heads", shape.heads), ("an MLP of", shape.intermediate), ("a vocabulary of", shape.vocab)):
        if size % grid.tp:
            said = f"{size:,} heads" if what == "heads" else f"{what} {size:,}"
            found.append(f"{shape.name} has {said}, which TP {grid.tp} does not divide.")
    if shape.kv_heads % grid.tp and grid.tp % shape.kv_heads:
        found.append(f"{shape.name} has {shape.kv_heads} kv heads: TP {grid.tp} neither divides nor repeats them.")
    if grid.tp > asked.machines.per_node:
        found.append(
            f"TP {grid.tp} leaves the node of {asked.machines.per_node} GPUs: its all-reduces would cross the network."
        )
    if grid.pp > shape.layers:
        found.append(f"{shape.name} has {shape.layers} layers, too few for PP {grid.pp}.")
    if asked.seq_len % grid.cp:
        found.append(f"seq_len={asked.seq_len:,} does not divide by CP {grid.cp}.")
    if batch % grid.dp:
        found.append(f"global_batch={batch:,} does not divide by DP {grid.dp}.")
    return found


def _way_faults(way: Way, grid: Grid) -> list[str]:
    """A sentence where no program runs this strategy on this grid."""
    if goes(way, (grid.dp, grid.tp, grid.pp, grid.cp)):
        return []
    if way.strategy == "single":
        return ["strategy='single' is for one data-parallel rank: take ddp, zero1, zero2, zero3 or fsdp."]
    if grid.dp * grid.cp == 1:
        return [f"{way.strategy} shares among data-parallel ranks and there is one: take strategy='single'."]
    if grid.pp > 1:
        what = way.strategy if way.strategy != "zero1" else f"offload={way.offload!r}"
        return [f"DeepSpeed's pipeline takes no {what}: with PP {grid.pp} take zero1 without offload, ddp or fsdp."]
    return [f"{way.method} keeps each matrix in one piece: take tp=1, pp=1 and cp=1."]


def _variant(asked: Question, grid: Grid, fixed: dict[str, Any]) -> tuple[Plan | None, Refusal | None]:
    """The fastest variant that fits; or how far the most frugal one is from it."""
    if "micro_batch" in fixed and fixed["micro_batch"] not in micro_batches(asked.global_batch // grid.dp):
        each = asked.global_batch // grid.dp
        raise ValueError(
            f"micro_batch={fixed['micro_batch']}: a rank has {each:,} sequences a step; give a divisor of that up to 8, or one "
            "that is a power of two."
        )
    try:
        made, found = best_of(asked, grid, **fixed)
    except NoVariant:
        raise ValueError(
            f"No variant of {words(grid)} has {', '.join(f'{name}={fixed[name]}' for name in sorted(fixed))}: chunks must "
            "fill the stages and need micro-batches in rounds of PP, and sequence parallelism needs TP."
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
        if _shape_faults(asked, other) or not goes(Way(asked.methods[0], asked.strategies[0], asked.offload[0]),
                                                   (other.dp, other.tp, other.pp, other.cp)):  # fmt: skip
            continue
        try:
            made, _ = best_of(asked, other, **{name: value for name, value in fixed.items() if name != "chunks"})
        except NoVariant:  # this micro-batch, say, does not go with so many ranks
            continue
        if made is not None:
            found.append(made)
    unique = {one.grid: one for one in found}
    return tuple(sorted(unique.values(), key=lambda one: one.step_seconds))
