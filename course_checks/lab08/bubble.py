"""Lab 8, exercise 5: the bubble of a pipeline, and how many micro-batches make it small enough."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from course_checks.harness import NotYet, close, named_mistake, returned
from course_checks.lab08.common import lab
from course_lib.parallel.schedules import orders
from course_lib.parallel.simulate import simulate


class Pipeline(NamedTuple):
    """A pipeline: stages, micro-batches a step, chunks of layers on each rank (1: not interleaved)."""

    stages: int
    micro_batches: int
    chunks: int

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.micro_batches} micro-batches, {self.chunks} chunk{'s' * (self.chunks > 1)}"


class Bound(NamedTuple):
    """A pipeline, and the largest share of the time that its ranks may idle."""

    stages: int
    bound: float
    chunks: int

    def __str__(self) -> str:
        return f"{self.stages} stages, a bubble of at most {self.bound:g}, {self.chunks} chunk{'s' * (self.chunks > 1)}"


PIPELINES = (
    Pipeline(4, 8, 1),
    Pipeline(4, 4, 1),
    Pipeline(8, 32, 1),
    Pipeline(1, 5, 1),
    Pipeline(16, 64, 1),
    Pipeline(4, 8, 2),
    Pipeline(8, 32, 4),
    Pipeline(6, 12, 3),
)
# No bound is met exactly, except where the fractions are exact in binary: rounding decides nothing here
BOUNDS = (
    Bound(4, 0.25, 1),
    Bound(8, 0.15, 1),
    Bound(16, 0.035, 1),
    Bound(6, 0.5, 1),
    Bound(1, 0.1, 1),
    Bound(8, 0.15, 2),
    Bound(4, 0.25, 3),
    Bound(16, 0.03, 4),
    Bound(3, 0.07, 2),
)
BUBBLES = {
    "busy": "divides the idle time by the busy time, as some papers do; what is meant is the share of the whole time",
    "all stages": "counts p stages to wait for where p - 1 do: the first micro-batch is at the last stage after p - 1 others",
    "rounds": "leaves the p - 1 out of the whole time, or counts one too many: it takes m micro-batches and p - 1 more",
    "utilization": "is the share of the time in which ranks work; the bubble is the rest",
    "no chunks": "leaves the chunks out: a chunk is 1/v of a stage, so filling the pipeline takes 1/v of the time",
    "chunks as stages": "takes the chunks for more stages; the ranks stay p, and what gets shorter is the wait",
    "both ways": "counts the bubble twice, for forward and for backward; their work counts twice as well",
}
FEWEST = {
    "one less": "is one less than it takes: the bubble would be above the bound",
    "one more": "is one more than it takes: 'at most' includes the bound itself, and a rest is rounded up once",
    "floor": "rounds down: the bubble would be above the bound",
    "no groups": "gives interleaved schedules a number that does not divide by the stages: they send micro-batches through "
    "the chunks in groups of `stages`",
    "always groups": "gives multiples of the stages also without chunks: only interleaved schedules need them",
    "busy": "holds the bound against idle time over busy time, (p - 1)/m; it is a share of the whole time",
    "no chunks": "leaves the chunks out",
    "nothing": "gives 0: a step has at least one micro-batch",
}


def true_bubble(case: Pipeline) -> Fraction:
    """Idle share of the ranks' whole time, for equal stages, a backward twice as long as a forward, and free sends."""
    return Fraction(case.stages - 1, case.chunks * case.micro_batches + case.stages - 1)


def true_fewest(case: Bound) -> int:
    """By trying one after the other."""
    step = case.stages if case.chunks > 1 else 1
    count = step
    while true_bubble(Pipeline(case.stages, count, case.chunks)) > Fraction(case.bound).limit_denominator(10_000):
        count += step
    return count


@lab.exercise("The bubble", importance=4, difficulty=2, minutes=15)
def bubble(share: Callable[..., Any], fewest_micro_batches: Callable[..., Any]) -> str:
    """The idle share of eight pipelines by formula and as simulated from their orders; nine bounds met and not outdone."""
    yours = [returned(share(*case), (int, float, Fraction), f"the bubble of {case}") for case in PIPELINES]
    for case, mine in zip(PIPELINES, yours, strict=True):
        try:
            close(float(mine), float(true_bubble(case)), rtol=1e-6, atol=1e-9, what=f"{case}: the bubble")
        except NotYet as difference:
            mistake = named_mistake(yours, mistaken_bubble, PIPELINES, BUBBLES, join="; and it ", rtol=1e-6)
            raise NotYet(f"your bubble {mistake}" if mistake else str(difference)) from None
    for case in (PIPELINES[0], PIPELINES[5], PIPELINES[7]):
        close(float(share(*case)), simulated(case), rtol=1e-6, what=f"{case}: the bubble that the orders leave")
    counts = [returned(fewest_micro_batches(*case), int, f"the micro-batches for {case}") for case in BOUNDS]
    for case, mine in zip(BOUNDS, counts, strict=True):
        if mine != (wanted := true_fewest(case)):
            mistake = named_mistake(counts, mistaken_fewest, BOUNDS, FEWEST, join="; and it ", rtol=1e-6)
            raise NotYet(
                f"{case}: {wanted} micro-batches are the fewest, and you give {mine}"
                + (f". Your number {mistake}" if mistake else _verdict(case, mine))
            )
    first, deep = PIPELINES[0], BOUNDS[7]
    return (
        f"eight bubbles, three of them as the schedules' orders leave them ({first}: {float(true_bubble(first)):.1%}); nine bounds. "
        f"For at most {deep.bound:.0%} on {deep.stages} stages {true_fewest(deep._replace(chunks=1))} micro-batches, interleaved "
        f"over {deep.chunks} chunks {true_fewest(deep)}"
    )


def simulated(case: Pipeline) -> float:
    """The idle share when the schedule's own orders run in the simulator."""
    schedule = "interleaved" if case.chunks > 1 else "1f1b"
    line = simulate(orders(schedule, *case), forward=1.0, backward=2.0)
    busy = sum(event.end - event.start for event in line.events)
    return 1 - busy / (case.stages * line.seconds)


def _verdict(case: Bound, mine: int) -> str:
    if mine < 1:
        return f". {FEWEST['nothing'].split(': ')[1].capitalize()}"
    if case.chunks > 1 and mine % case.stages:
        return f", no multiple of {case.stages}, in which interleaved schedules come"
    reached = float(true_bubble(Pipeline(case.stages, mine, case.chunks)))
    return f", with a bubble of {reached:.4f}: {'too large' if reached > case.bound else 'fewer would do'}"


def mistaken_bubble(case: Pipeline, mistakes: tuple[str, ...]) -> float:
    """The bubble with these mistakes of BUBBLES made."""
    p, m, v = case.stages, case.micro_batches, 1 if "no chunks" in mistakes else case.chunks
    if "chunks as stages" in mistakes:
        p, v = p * v, 1
    idle = p if "all stages" in mistakes else p - 1
    if "both ways" in mistakes:
        idle *= 2
    whole = v * m + (0 if "busy" in mistakes else p if "rounds" in mistakes else idle)
    return (whole - idle) / whole if "utilization" in mistakes else idle / whole


def mistaken_fewest(case: Bound, mistakes: tuple[str, ...]) -> float:
    """The number of micro-batches with these mistakes of FEWEST made."""
    p, v, bound = (
        case.stages,
        1 if "no chunks" in mistakes else case.chunks,
        Fraction(case.bound).limit_denominator(10_000),
    )
    exact = (p - 1) / (bound * v) if "busy" in mistakes else (p - 1) * (1 - bound) / (bound * v)
    least = 0 if "nothing" in mistakes else 1
    count = max(least, int(exact) if "floor" in mistakes else -(-exact.numerator // exact.denominator))
    groups = (case.chunks > 1 and "no groups" not in mistakes) or "always groups" in mistakes
    if groups:
        count = max(least, -(-count // p)) * p
    return count + ("one more" in mistakes) - ("one less" in mistakes)
