"""Lab 8, exercise 3: a 1F1B schedule that meets its target time and memory, first simulated, then on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from course_checks.harness import ATOL, RTOL, NotYet, close, returned, run_ranks
from course_checks.lab08 import pipeline_on_ranks
from course_checks.lab08.common import lab
from course_lib.parallel.schedules import Action, Orders, ideal_bubble, orders
from course_lib.parallel.simulate import Timeline, simulate


class Target(NamedTuple):
    """Stages of equal work and micro-batches; a forward takes 1 second, a backward 2, a send nothing."""

    stages: int
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.stages} stage{'s' * (self.stages > 1)}, {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"

    @property
    def seconds(self) -> float:
        """m micro-batches of 3 seconds, and p - 1 more to fill and to empty the pipeline."""
        return 3.0 * (self.micro_batches + self.stages - 1)

    def held(self, rank: int) -> int:
        """The most micro-batches of which a rank may keep activations."""
        return min(self.stages - rank, self.micro_batches)


TARGETS = (Target(4, 8), Target(3, 5), Target(2, 1), Target(4, 3), Target(1, 3), Target(8, 16))
ON_RANKS = Target(4, 6)


@lab.exercise("A 1F1B schedule", importance=5, difficulty=3, minutes=30)
def one_f_one_b(schedule: Callable[..., Any]) -> str:
    """Target time and memory on six pipelines in the simulator; the same gradients as one process on four real ranks."""
    for target in (*TARGETS, ON_RANKS):
        mine = _orders(schedule(*target), target)
        _judge(mine, target)
    mine = _orders(schedule(*ON_RANKS), ON_RANKS)
    run = run_ranks(pipeline_on_ranks.run_orders, mine, ON_RANKS.micro_batches, ranks=ON_RANKS.stages)
    for rank, (told, expected) in enumerate(zip(run.results, pipeline_on_ranks.whole(*ON_RANKS), strict=True)):
        close(told["gradients"], expected, rtol=RTOL, atol=ATOL, what=f"stage {rank} on real ranks: the gradient")
        if told["most"] > ON_RANKS.held(rank):
            raise NotYet(
                f"on real ranks rank {rank} held {told['most']} micro-batches at a time, not {ON_RANKS.held(rank)}"
            )
    ideal = ideal_bubble("1f1b", *ON_RANKS)
    return (
        f"{len(TARGETS)} pipelines in time and within memory; on {ON_RANKS.stages} real ranks ({ON_RANKS}) the gradients of one "
        f"process, {run.results[0]['most']} micro-batches held at most, a bubble of {_bubble(run.results):.0%} where the formula "
        f"has {ideal:.0%}"
    )


def _bubble(results: list[dict[str, Any]]) -> float:
    """Idle share of the ranks' time on the clock, from the first event to the last."""
    events = [event for told in results for event in told["events"]]
    busy = sum(end - start for _, _, start, end in events)
    seconds = max(end for *_, end in events) - min(start for _, _, start, _ in events)
    return 1 - busy / (seconds * len(results))


def _orders(value: Any, target: Target) -> Orders:
    value = returned(value, (list, tuple), "the schedule")
    if len(value) != target.stages:
        raise NotYet(f"{target}: give one list of actions for each rank, {target.stages}, not {len(value)}")
    for rank, order in enumerate(value):
        if not isinstance(order, (list, tuple)) or isinstance(order, Action):
            raise NotYet(f"{target}: what rank {rank} does should be a list of actions, and is {type(order).__name__}")
        for action in order:
            if not isinstance(action, tuple) or len(action) not in (2, 3):
                raise NotYet(f"{target}, rank {rank}: {action!r} is no action: write Action('F', micro_batch)")
            if action[0] == "W" or any(action[2:]):
                raise NotYet(f"{target}, rank {rank}: one chunk a rank, and B is the whole backward: F and B only")
    return [[Action(*action) for action in order] for order in value]


def _judge(mine: Orders, target: Target) -> None:
    right = orders("1f1b", *target)
    if target.stages > 1 and mine != right and mine == right[::-1]:
        raise NotYet(
            f"{target}: the ranks are in reverse. Rank 0 has the first stage: its first backward is the last to arrive, so it is "
            "the one that begins with the most forwards"
        )
    try:
        line = simulate(mine, forward=1.0, backward=2.0)
    except ValueError as error:
        raise NotYet(f"{target}: {error}{_hint(mine, right)}") from None
    if any(len(order) != 2 * target.micro_batches for order in mine):
        raise NotYet(f"{target}: a rank runs {len(mine[0])} actions; each micro-batch has a forward and a backward")
    _memory(mine, line, target)
    if line.seconds > target.seconds + 1e-6:
        shown = f"{target}: your orders take {line.seconds:g} s, and {target.seconds:g} s are the target"
        if mine == orders("naive", *target):
            raise NotYet(
                f"{shown}: one micro-batch goes all the way and back before the next begins, and so one rank works at a time"
            )
        raise NotYet(f"{shown}{_slow(mine, right)}")


def _memory(mine: Orders, line: Timeline, target: Target) -> None:
    over = [rank for rank, held in enumerate(line.in_flight) if held > target.held(rank)]
    if not over:
        return
    rank = over[0]
    shown = (
        f"{target}: rank {rank} keeps the activations of {line.in_flight[rank]:g} micro-batches at a time, and has room for "
        f"{target.held(rank)}"
    )
    if mine == orders("gpipe", *target):
        raise NotYet(
            f"{shown}: all forwards before the first backward, that is GPipe. Run a backward as soon as one can run"
        )
    if all(_warm_up(order) == _warm_up(mine[0]) for order in mine) and target.stages > 1:
        raise NotYet(
            f"{shown}: every rank begins with {_warm_up(mine[0])} forwards. The last stage can run a backward right after its "
            "first forward; each stage before it, one forward later"
        )
    raise NotYet(
        f"{shown}: it begins with {_warm_up(mine[rank])} forwards before its first backward, and {target.held(rank)} fill the "
        "time until the first gradient comes back"
    )


def _slow(mine: Orders, right: Orders) -> str:
    short = [rank for rank, order in enumerate(mine) if _warm_up(order) < _warm_up(right[rank])]
    if short:
        rank = short[0]
        return (
            f". Rank {rank} begins with {_warm_up(mine[rank])} forward{'s' * (_warm_up(mine[rank]) > 1)} and then waits for a "
            f"gradient, which must first come back through {len(mine) - 1 - rank} stages: {_warm_up(right[rank])} forwards fill "
            "that time"
        )
    rank, place = next((r, n) for r, o in enumerate(mine) for n, a in enumerate(o) if a != right[r][n])
    return f". Rank {rank} runs {mine[rank][place]} in place {place + 1}; after the first forwards, B and F take turns"


def _hint(mine: Orders, right: Orders) -> str:
    if any(order and order[0].kind == "B" for order in mine):
        return " A rank's first action is a forward."
    if any(
        sorted(a.micro_batch for a in order if a.kind == "B") != [a.micro_batch for a in order if a.kind == "B"]
        for order in mine
    ):
        return " Backwards come in the order of the forwards, the oldest first."
    if any(_warm_up(order) < _warm_up(later) for order, later in zip(mine, mine[1:], strict=False)):
        return " A later stage begins with fewer forwards than the one before it, never with more."
    return ""


def _warm_up(order: list[Action]) -> int:
    """Forwards before the first backward."""
    return next((n for n, action in enumerate(order) if action.kind == "B"), len(order))
