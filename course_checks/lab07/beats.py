"""What a rank tells while it trains, and the traces of beats that the watchdog's rule is asked about.

A rank sends a beat when it begins something, and while it computes one every `every` seconds (from hooks in its
layers). In a collective or in a save it is silent: both are one long call.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

WORKING, WAITING, SAVING, DONE = "working", "waiting", "saving", "done"
EVERY = 10.0  # seconds between two beats of a rank that computes
SAVE_LIMIT = 300.0  # seconds that a save may take


class Beat(NamedTuple):
    """One beat: ``received`` by the watchdog's clock, ``sent`` by the rank's own, which may be wrong."""

    rank: int
    received: float
    sent: float
    step: int
    phase: str  # "working", "waiting" (in a collective), "saving" or "done"


class Trace(NamedTuple):
    """The beats of a run; ``culprits``: rank -> its last beat before it hung. ``until``: the watchdog looks until then."""

    shows: str
    beats: tuple[Beat, ...]
    until: float
    culprits: dict[int, float]
    every: float = EVERY
    save_limit: float = SAVE_LIMIT


class _Run:
    """Writes the beats of ranks that take equal steps of ``working`` seconds, then all-reduce."""

    def __init__(self, ranks: int, skew: dict[int, float] | None = None) -> None:
        self.now, self.step, self.ranks, self.skew = 0.0, 0, ranks, skew or {}
        self.beats: list[Beat] = []

    def beat(self, rank: int, at: float, phase: str) -> None:
        at += 0.1 * rank
        self.beats.append(Beat(rank, at, at + self.skew.get(rank, 0.0), self.step, phase))

    def work(self, rank: int, seconds: float, *, late: float = 1.0, stops_after: float | None = None) -> float:
        """Beats of one rank's work; returns the time of the last one. ``late``: how far apart, in EVERY."""
        at = last = self.now
        end = self.now + (seconds if stops_after is None else stops_after)
        while at < end - 1e-6:
            self.beat(rank, at, WORKING)
            last, at = at, at + EVERY * late
        return last

    def steps(self, count: int, seconds: float = 25.0, slow: dict[int, float] | None = None, late: float = 1.0) -> None:
        """Whole steps: everybody works, waits for the slowest, and goes on together."""
        for _ in range(count):
            self.step += 1
            times = [(slow or {}).get(rank, seconds) for rank in range(self.ranks)]
            for rank, length in enumerate(times):
                self.work(rank, length, late=late if length == max(times) else 1.0)
                self.beat(rank, self.now + length, WAITING)
            self.now += max(times) + 1.0

    def done(self) -> tuple[Beat, ...]:
        return tuple(sorted(self.beats, key=lambda b: b.received))


def made_up() -> list[Trace]:
    """Traces with one catch each."""
    traces = []
    run = _Run(3)
    run.steps(8)
    for rank in range(3):
        run.beat(rank, run.now, DONE)
    traces.append(
        Trace(
            "a healthy run of three ranks that ends well (who is done is silent for ever)",
            run.done(),
            run.now + 200,
            {},
        )
    )

    run = _Run(3)
    run.steps(3)
    run.steps(1, slow={1: 180.0})
    run.steps(2)
    traces.append(
        Trace(
            "one slow step of rank 1, which takes 180 s and beats all the time (its step number stands still)",
            run.done(),
            run.now,
            {},
        )
    )

    run = _Run(3)
    run.steps(2)
    run.steps(2, slow={2: 95.0}, late=1.8)
    run.steps(1)
    traces.append(
        Trace(
            "a busy machine, on which the beats of rank 2 come 18 s apart (late is not hung)", run.done(), run.now, {}
        )
    )

    run = _Run(4)
    run.steps(3)
    run.step += 1
    for rank in (0, 1, 3):
        run.work(rank, 25.0)
        run.beat(rank, run.now + 25.0, WAITING)
    last = run.work(2, 25.0, stops_after=15.0)
    traces.append(
        Trace(
            "rank 2 of four hangs in its work; the others wait for it in a collective",
            run.done(),
            run.now + 400,
            {2: last + 0.2},
        )
    )

    run = _Run(3)
    run.steps(2)
    run.beat(0, run.now, SAVING)
    for rank in (1, 2):
        run.step = 3
        run.beat(rank, run.now, WAITING)
    run.now += 240.0
    run.steps(3)
    traces.append(Trace("rank 0 saves a checkpoint for 240 s, and the others wait for it", run.done(), run.now, {}))

    run = _Run(2)
    run.steps(2)
    run.beat(0, run.now, SAVING)
    run.step = 3
    run.beat(1, run.now, WAITING)
    traces.append(
        Trace(
            f"rank 0 begins to save and never comes back (a save may take {SAVE_LIMIT:.0f} s)",
            run.done(),
            run.now + 900,
            {0: run.now + SAVE_LIMIT - 2 * EVERY},
        )
    )

    run = _Run(3, skew={1: -500.0, 2: 130.0})
    run.steps(4)
    traces.append(Trace("three machines whose clocks are minutes apart", run.done(), run.now, {}))

    run = _Run(3, skew={0: 700.0})
    run.steps(2)
    run.step += 1
    for rank in (1, 2):
        run.work(rank, 25.0)
        run.beat(rank, run.now + 25.0, WAITING)
    last = run.work(0, 25.0, stops_after=5.0)
    traces.append(Trace("rank 0 hangs, and its clock is 700 s ahead", run.done(), run.now + 300, {0: last}))

    run = _Run(4)
    run.steps(1)
    run.step += 1
    run.work(0, 60.0)
    run.beat(0, run.now + 60.0, WAITING)
    last = {rank: run.work(rank, 60.0, stops_after=after) + 0.1 * rank for rank, after in ((1, 15.0), (3, 35.0))}
    run.work(2, 60.0)
    run.beat(2, run.now + 60.0, WAITING)
    traces.append(Trace("ranks 1 and 3 of four hang, at different times", run.done(), run.now + 300, last))

    run = _Run(3)
    run.steps(3)
    run.step += 1
    for rank in range(3):  # rank 1 calls one collective more than the others, and is alone in it
        run.work(rank, 25.0)
        run.beat(rank, run.now + 25.0, WAITING)
    first = run.now + 25.0
    run.now, run.step = run.now + 26.0, run.step + 1
    for rank in (0, 2):
        run.work(rank, 25.0)
        run.beat(rank, run.now + 25.0, WAITING)
    assert first < run.now
    last = run.now + 25.2
    traces.append(
        Trace(
            "everybody waits: ranks 0 and 2 in step 5, rank 1 still in step 4, in a collective of its own",
            run.done(),
            run.now + 300,
            {1: last},
        )
    )

    run = _Run(2)
    run.steps(2)
    run.step += 1
    for rank in (0, 1):
        run.work(rank, 25.0)
        run.beat(rank, run.now + 25.0, WAITING)
    last = run.now + 25.1
    traces.append(
        Trace(
            "both ranks wait in the same step, and nothing comes: the network is gone",
            run.done(),
            run.now + 300,
            {0: last, 1: last},
        )
    )
    return traces


@functools.cache
def recorded() -> list[Trace]:
    """Beats of three real ranks: a healthy run with a slow step and a save, and one in which a rank hangs."""
    told = json.loads(Path(__file__).with_name("beats.json").read_text(encoding="utf-8"))
    return [
        Trace(
            run["shows"],
            tuple(Beat(*beat) for beat in run["beats"]),
            run["until"],
            {int(rank): at for rank, at in run["culprits"].items()},
            run["every"],
            run["save_limit"],
        )
        for run in told["runs"]
    ]
