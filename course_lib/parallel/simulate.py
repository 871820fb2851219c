"""A pipeline without ranks: when would each action of a schedule run, how long do ranks idle, how much must they hold?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    """What the ranks of a pipeline did in one optimizer step, simulated or real.

    Attributes:
        events: by start.
        seconds: from the first event's start to the last one's end.
        bubble: idle share of the ranks' time within these seconds, as `course_lib.parallel.schedules.ideal_bubble`.
        in_flight: for each rank the most micro-batches whose activations it held at a time. With v chunks a rank, what
            one chunk keeps of a micro-batch counts 1/v.
    """

    events: list[Event]
    seconds: float
    bubble: float
    in_flight: list[float]


def timeline(events: Iterable[Sequence], ranks: int | None = None) -> Timeline:
    """Read a Timeline off events, which may come from a real run.

    Args:
        events: `Event`s, or sequences of the same six values.
        ranks: in the pipeline; as many as the events name by default.
    """
    ran = sorted((Event(*event) for event in events), key=lambda event: (event.start, event.rank))
    if not ran:
        raise ValueError("There are no events: run at least one action.")
    ranks = ranks or 1 + max(event.rank for event in ran)
    seconds = max(event.end for event in ran) - ran[0].start
    busy = sum(event.end - event.start for event in ran)
    in_flight = [peak_held([Action(*event[1:4]) for event in ran if event.rank == rank]) for rank in range(ranks)]
    return Timeline(ran, seconds, 1 - busy / (ranks * seconds) if seconds else 0.0, in_flight)


def peak_held(order: Sequence[Action]) -> float:
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
    """Run orders by their dependencies alone; each rank starts an action as soon as what it needs is there.

    A forward needs the one of the stage before, a backward that of the stage after (on the last stage: the forward), W
    its B. Chunk c of rank r is stage c * ranks + r.

    Args:
        orders: one list of actions a rank, as from `course_lib.parallel.schedules.orders`.
        forward, backward, weight: seconds of F, B and W, of one chunk. Where no order has a W, B is the whole backward and
            takes `backward` + `weight`.
        send: seconds from the end of an action to where its result is on another rank; ranks do not wait for it to leave.
    """
    for name, value in (("forward", forward), ("backward", backward), ("weight", weight), ("send", send)):
        if value < 0:
            raise ValueError(f"{name}={value}: give seconds, at least 0.")
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
                needs = needed(action, stage, stages)
                if any(need not in ends for need in needs):
                    break
                there = (ends[need] + (send if need[2] % ranks != rank else 0.0) for need in needs)
                start = max([free[rank], *there])
                free[rank] = ends[action.kind, action.micro_batch, stage] = start + takes[action.kind]
                events.append(Event(rank, *action, start, free[rank]))
                position[rank] += 1
                progress = True
    if len(events) < sum(map(len, orders)):
        raise ValueError(_deadlock(orders, position, ends, stages))
    return timeline(events, ranks)


def needed(action: Action, stage: int, stages: int) -> list[tuple[str, int, int]]:
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
    well = isinstance(action, tuple) and len(action) in (2, 3) and action[0] in WORDS
    if not well or not all(isinstance(number, int) and number >= 0 for number in action[1:]):
        raise ValueError(f"rank {rank}: {action!r} is no action: write Action('F', 'B' or 'W', micro_batch, chunk).")
    return Action(*action)


def _check_complete(orders: list[list[Action]]) -> None:
    if not any(orders):
        raise ValueError("There is nothing to run: give each rank a list of actions.")
    every = [action for order in orders for action in order]
    kinds = "FBW" if any(action.kind == "W" for action in every) else "FB"
    pairs = [
        (i, c) for i in range(1 + max(a.micro_batch for a in every)) for c in range(1 + max(a.chunk for a in every))
    ]
    for rank, order in enumerate(orders):
        seen: set[Action] = set()
        for action in order:
            if action in seen:
                raise ValueError(f"rank {rank} runs {action} twice.")
            seen.add(action)
        for pair in pairs:
            for kind in kinds:
                if (kind, *pair) not in seen:
                    raise ValueError(f"rank {rank} never runs {Action(kind, *pair)}.")


def _deadlock(orders: list[list[Action]], position: list[int], ends: dict, stages: int) -> str:
    """Name a rank that waits for something of its own first, for that is where the mistake is."""
    stuck = []
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            action = order[position[rank]]
            kind, micro_batch, stage = next(
                need for need in needed(action, action.chunk * len(orders) + rank, stages) if need not in ends
            )
            other, chunk = stage % len(orders), stage // len(orders)
            stuck.append((other != rank, rank, action, other, Action(kind, micro_batch, chunk)))
    _, rank, action, other, waits = min(stuck)
    if other == rank:
        return f"Deadlock: rank {rank} is to run {action}, but {waits} comes later in its own order."
    at = orders[other][position[other]]
    return f"Deadlock: rank {rank} is to run {action} and waits for {waits} on rank {other}, which is stuck at {at}."
