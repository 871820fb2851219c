"""The way in which practitioners look for a configuration, step by step, as a search of its own.

Raise data parallelism to the most that fits; then choose between tensor and pipeline parallelism; then try more, smaller
micro-batches; then pay with checkpointing for less tensor and pipeline parallelism. After each try measure, here with the
planner's cost model, and keep the fastest. It looks at a handful of configurations; `plan` looks at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from course_lib.choices import ACTIVATION_CHECKPOINTING
from course_lib.memory import Shape
from course_lib.parallel.grid import Grid
from course_lib.units import GIB
from course_tools.planning.answer import NoPlan, Plan, Settings, words
from course_tools.planning.fit import Needs
from course_tools.planning.machines import Machines
from course_tools.planning.question import Question, question
from course_tools.planning.search import measured
from course_tools.planning.space import divisors, micro_batch_sizes, tensor_degrees, way_fault
from course_tools.planning.table import Way


@dataclass(frozen=True)
class Tried:
    """One configuration and what it measured. `needs`: bytes on a card; `tokens_per_second` 0 where it does not fit."""

    plan: Plan
    needs: int
    fits: bool

    @property
    def tokens_per_second(self) -> float:
        return self.plan.tokens_per_second if self.fits else 0.0


@dataclass(frozen=True)
class Step:
    """One step of the procedure: what it does, everything that it tried, and the best so far after it."""

    what: str
    tried: tuple[Tried, ...]
    best: Tried | None

    def __str__(self) -> str:
        lines = [self.what]
        for one in self.tried:
            speed = f"{one.tokens_per_second:,.0f} tokens/s" if one.fits else "does not fit"
            mark = " *" if self.best is not None and one is self.best else ""
            checkpointing = one.plan.activation_checkpointing.replace("none", "no")
            lines.append(
                f"  {words(one.plan.grid)}, micro-batch {one.plan.micro_batch_size} x {one.plan.num_microbatches}, "
                f"{checkpointing} checkpointing: {one.needs / GIB:,.1f} GiB, {speed}{mark}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Procedure:
    """`steps` in their order, the `plan` they end in, and how many configurations were measured."""

    steps: tuple[Step, ...]
    plan: Plan
    measured: int

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def procedure(
    model: str | Shape | Any,
    cluster: str | Machines,
    *,
    strategy: str = "zero1",
    method: str = "full",
    **choices: Any,
) -> Procedure:
    """Look for a configuration as people do.

    Args:
        strategy: how data-parallel ranks share, as of `plan`; the talk that tells the procedure uses ZeRO-1.
        choices: global_batch, seq_len, precision, attention, tokens, constants as of `plan`.
    """
    asked = question(model, cluster, methods=(method,), strategies=(strategy,), **choices)
    walk = _Walk(asked, method, strategy)
    walk.raise_data_parallelism("none", "Raise data parallelism to the most that fits")
    walk.exchange("Tensor or pipeline parallelism: the same number of data-parallel ranks")
    walk.cut("More micro-batches, or fewer and larger ones")
    walk.checkpoint("Checkpointing in exchange for less tensor and pipeline parallelism")
    if walk.best is None:
        raise NoPlan(
            f"The procedure finds nothing that fits {asked.machines} for {asked.shape.name} by {strategy}: ask plan(), which "
            "knows sharded parameters and offload, too.",
            0,
            None,
            (),
        )
    return Procedure(tuple(walk.steps), walk.best.plan, sum(len(step.tried) for step in walk.steps))


class _Walk:
    """The state of the procedure: the best so far."""

    def __init__(self, asked: Question, method: str, strategy: str) -> None:
        self.asked, self.method, self.strategy = asked, method, strategy
        self.best: Tried | None = None
        self.steps: list[Step] = []
        self.degrees = tensor_degrees(asked.shape, asked.machines.per_node)

    def splits(self, parts: int) -> list[tuple[int, int]]:
        """(tp, pp) of a model cut into so many parts, the widest tensor parallelism first: it stays in the node."""
        found = [(tp, parts // tp) for tp in reversed(self.degrees) if parts % tp == 0]
        return [(tp, pp) for tp, pp in found if pp <= self.asked.shape.layers and self.goes(tp, pp)]

    def goes(self, tp: int, pp: int) -> bool:
        dp = self.asked.machines.gpus // (tp * pp)
        way = Way(self.method, self.strategy if dp > 1 else "single", "none")
        return self.asked.global_batch % dp == 0 and not way_fault(way, Grid(dp=dp, tp=tp, pp=pp))

    def measure(self, tp: int, pp: int, micro_batch_size: int, activation_checkpointing: str) -> Tried:
        dp = self.asked.machines.gpus // (tp * pp)
        chosen = Settings(
            strategy=self.strategy if dp > 1 else "single",
            method=self.method,
            dp=dp,
            tp=tp,
            pp=pp,
            sequence_parallel=tp > 1 and self.asked.seq_len % tp == 0,
            micro_batch_size=micro_batch_size,
            num_microbatches=self.asked.global_batch // dp // micro_batch_size,
            activation_checkpointing=activation_checkpointing,
            precision=self.asked.precision,
        )
        made: tuple[Plan, Needs] = measured(self.asked, chosen)
        return Tried(made[0], made[1].memory.device, made[1].fits(self.asked))

    def keep(self, what: str, tried: list[Tried]) -> None:
        for one in tried:
            if one.tokens_per_second > (self.best.tokens_per_second if self.best else 0.0):
                self.best = one
        self.steps.append(Step(what, tuple(tried), self.best))

    def raise_data_parallelism(self, activation_checkpointing: str, what: str, below: int | None = None) -> None:
        """The model in as few parts as fit, and in fewer than `below`."""
        tried: list[Tried] = []
        for parts in divisors(self.asked.machines.gpus):
            if below is not None and parts >= below:
                break
            splits = self.splits(parts)
            for tp, pp in splits[:1]:  # one try a number of parts; the next step chooses between its splits
                tried.append(self.measure(tp, pp, 1, activation_checkpointing))
            if tried and tried[-1].fits:
                break
        self.keep(what, tried)

    def exchange(self, what: str) -> None:
        if self.best is None:
            return
        now = self.best.plan
        splits = [split for split in self.splits(now.tp * now.pp) if split != (now.tp, now.pp)]
        self.keep(what, [self.measure(tp, pp, 1, now.activation_checkpointing) for tp, pp in splits])

    def cut(self, what: str) -> None:
        if self.best is None:
            return
        now = self.best.plan
        sizes = [b for b in micro_batch_sizes(self.asked.global_batch // now.dp) if b != now.micro_batch_size]
        tried: list[Tried] = []
        for size in sizes:
            tried.append(self.measure(now.tp, now.pp, size, now.activation_checkpointing))
            if not tried[-1].fits:
                break
        self.keep(what, tried)

    def checkpoint(self, what: str) -> None:
        """The whole walk once more with checkpointing, where that makes fewer parts possible; the faster of both stays."""
        before = self.best
        for kind in ACTIVATION_CHECKPOINTING[1:]:
            walk = _Walk(self.asked, self.method, self.strategy)
            below = before.plan.tp * before.plan.pp if before else None
            walk.raise_data_parallelism(kind, f"{what}: {kind}", below)
            walk.exchange(f"{what}: tensor or pipeline")
            walk.cut(f"{what}: micro-batches")
            for step in walk.steps:
                self.keep(step.what, list(step.tried))
