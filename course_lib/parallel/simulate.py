"""A pipeline without ranks: when would each action of a schedule run, how long do ranks idle, how much must they hold?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from course_lib.parallel.schedules import WORDS, Action


class Event(NamedTuple):
    """An action that ran on a rank, from `start` to `end` (seconds)."""

    rank: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What the ranks of a pipeline did in one optimizer step, simulated or real."""

    events: list[Event]  # by start
    seconds: float  # from the first event's start to the last one's end
    bubble: float  # idle share of the ranks' time within these seconds, as `schedules.ideal_bubble`
    in_flight: list[float]  # by rank: the most micro-batches held at a time; one of v chunks holds 1/v of a micro-batch


def timeline(events: Iterable[Sequence], ranks: int | None = None) -> Timeline:
    """Read a Timeline off events of `ranks` ranks, which may come from a real run: `Event`s, or their six values."""
    ran = sorted((Event(*event) for event in events), key=lambda event: (event.start, event.rank))
    ranks = ranks or 1 + max(event.rank for event in ran)
    seconds = max(event.end for event in ran) - ran[0].start
    busy = sum(event.end - event.start for event in ran)
    in_flight = [_peak_held([Action(*event[1:4]) for event in ran if event.rank == rank]) for rank in range(ranks)]
    return Timeline(ran, seconds, 1 - busy / (ranks * seconds) if seconds else 0.0, in_flight)


def _peak_held(order: Sequence[Action]) -> float:
    """The most micro-batches that a rank holds in its order: from F until W, or until B where there is no W."""
    last = "W" if any(action.kind == "W" for action in order) else "B"
    chunks = 1 + max((action.chunk for action in order), default=0)
    held = most = 0
    for action in order:
        held += (action.kind == "F") - (action.kind == last)
        most = max(most, held)
    return most if chunks == 1 else most / chunks


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 0.0,
    send: float = 0.0,
) -> Timeline:
    """Run orders by their dependencies alone: each rank starts an action as soon as what it needs is there.

    A wrong order is a ValueError that names the rank and its mistake: an action missing or run twice, or a deadlock.

    Args:
        orders: one list of actions a rank, as from `course_lib.parallel.schedules.orders`.
        forward, backward, weight: seconds of F, B and W, of one chunk. Where no order has a W, B is the whole backward and
            takes `backward` + `weight`.
        send: seconds from the end of an action until its result is on another rank. The sender does not wait.
    """
    orders = [[_read(rank, action) for action in order] for rank, order in enumerate(orders)]
    _check_complete(orders)
    ranks = len(orders)
    stages = ranks * (1 + max(action.chunk for order in orders for action in order))
    split = any(action.kind == "W" for order in orders for action in order)
    takes = {"F": forward, "B": backward if split else backward + weight, "W": weight}

    ends: dict[tuple[str, int, int], float] = {}  # (kind, micro-batch, stage) -> when it was done
    events: list[Event] = []
    free, position = [0.0] * ranks, [0] * ranks
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                stage = action.chunk * ranks + rank
                needs = _needs(action, stage, stages)
                if any(need not in ends for need in needs):
                    break
                arrivals = (ends[need] + (send if need[2] % ranks != rank else 0.0) for need in needs)
                start = max([free[rank], *arrivals])
                free[rank] = ends[action.kind, action.micro_batch, stage] = start + takes[action.kind]
                events.append(Event(rank, *action, start, free[rank]))
                position[rank] += 1
                progress = True
    if len(events) < sum(map(len, orders)):
        raise ValueError(_deadlock(orders, position, ends, stages))
    return timeline(events, ranks)


def _needs(action: Action, stage: int, stages: int) -> list[tuple[str, int, int]]:
    """(kind, micro-batch, stage) of what must be done before an action of `stage` can start."""
    kind, micro_batch, _ = action
    if kind == "F":
        return [("F", micro_batch, stage - 1)] if stage else []
    if kind == "W":
        return [("B", micro_batch, stage)]
    after = [("B", micro_batch, stage + 1)] if stage < stages - 1 else []
    return [("F", micro_batch, stage), *after]


def _read(rank: int, action: Sequence) -> Action:
    """An Action out of what somebody wrote by hand."""
    if isinstance(action, tuple) and len(action) in (2, 3) and action[0] in WORDS:
        if all(isinstance(number, int) and number >= 0 for number in action[1:]):
            return Action(*action)
    raise ValueError(f"rank {rank}: {action!r} is no action: write Action('F', 'B' or 'W', micro_batch, chunk).")


def _check_complete(orders: list[list[Action]]) -> None:
    """Each rank runs each kind of action once for each micro-batch in each chunk."""
    ran = [action for order in orders for action in order]
    if not ran:
        raise ValueError("There is nothing to run: give each rank a list of actions.")
    kinds = "FBW" if any(action.kind == "W" for action in ran) else "FB"
    micro_batches, chunks = (1 + max(action[i] for action in ran) for i in (1, 2))
    for rank, order in enumerate(orders):
        times = Counter(order)
        for kind, micro_batch, chunk in product(kinds, range(micro_batches), range(chunks)):
            action = Action(kind, micro_batch, chunk)
            if times[action] != 1:
                what = f"runs {action} twice" if times[action] else f"never runs {action}"
                raise ValueError(f"rank {rank} {what}.")


def _deadlock(orders: list[list[Action]], position: list[int], ends: dict, stages: int) -> str:
    """Name a rank that waits for something of its own first, for that is where the mistake is."""
    stuck = []
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            action = order[position[rank]]
            needs = _needs(action, action.chunk * len(orders) + rank, stages)
            kind, micro_batch, stage = next(need for need in needs if need not in ends)
            chunk, other = divmod(stage, len(orders))
            stuck.append((other != rank, rank, action, other, Action(kind, micro_batch, chunk)))
    _, rank, action, other, waits = min(stuck)
    if other == rank:
        return f"Deadlock: rank {rank} is to run {action}, but {waits} comes later in its own order."
    at = orders[other][position[other]]
    return f"Deadlock: rank {rank} is to run {action} and waits for {waits} on rank {other}, which is stuck at {at}."
