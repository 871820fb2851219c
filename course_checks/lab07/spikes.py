"""Lab 7, exercise 6: a spike detector, run over recorded losses step by step."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from course_checks.harness import NotYet, nothing
from course_checks.lab07.common import lab


class Spike(NamedTuple):
    """A disturbance: reported by ``first`` + 1 at the latest; until ``last`` further alarms are no false ones."""

    first: int
    last: int
    what: str


# what was done to each run, by the step in which it shows in the loss
SPIKES: dict[str, tuple[Spike, ...]] = {
    "healthy": (),
    "noisy": (),
    "drift": (),
    "bad batches": tuple(Spike(s, s, "a batch of random bytes") for s in (150, 153, 280)),
    "learning rate": (Spike(201, 240, "a learning rate 60 times too high for two steps"),),
    "nan": (Spike(100, 100, "a batch of random bytes"), Spike(221, 10**6, "a gradient that is not a number")),
}
ABOUT = {
    "healthy": "a healthy run, whose loss falls from 5.6 to 2 (falling is no spike, and a high start is none)",
    "noisy": "a healthy run with small, noisy batches (noise as wide as ever is no spike)",
    "drift": "a run whose loss drifts up over 240 steps (that needs somebody's eyes, and no roll-back)",
    "bad batches": "a run with three bad batches, two of them close together",
    "learning rate": "a run whose learning rate was too high for two steps, and that recovers slowly",
    "nan": "a run with a bad batch, whose loss is no number later",
}


@functools.cache
def recorded() -> dict[str, tuple[float, ...]]:
    """Losses of each recorded run; the file says on what machine."""
    told = json.loads(Path(__file__).with_name("losses.json").read_text(encoding="utf-8"))["runs"]
    return {name: tuple(math.nan if x is None else x for x in losses) for name, losses in told.items()}


@lab.exercise("A spike detector", importance=4, difficulty=3, minutes=25)
def spike_detector(is_spike: Callable[..., Any]) -> str:
    """Six recorded runs, also scaled and shifted in time, told step by step; what comes later stays unseen."""
    steps = 0
    for name, losses in recorded().items():
        _right(is_spike, name, losses, ABOUT[name])
        steps += len(losses)
    late = recorded()["bad batches"][100:]
    _right(is_spike, "bad batches", late, "the same run, resumed at step 100", start=100)
    scaled = tuple(x * 3 for x in recorded()["bad batches"])
    _right(
        is_spike,
        "bad batches",
        scaled,
        "the same run with a loss three times as large (another vocabulary, summed losses)",
    )
    caught = sum(map(len, SPIKES.values()))
    return f"{steps:,} recorded steps: {caught} disturbances, each noticed within a step, and no false alarm"


def _right(is_spike: Callable[..., Any], name: str, losses: tuple[float, ...], about: str, start: int = 0) -> None:
    alarms = set()
    for at, loss in enumerate(losses):
        said = is_spike(list(losses[:at]), loss)
        if said is None or said is ...:
            raise nothing("True or False")
        try:
            said = bool(said) if not isinstance(said, (str, bytes)) else None
        except (TypeError, ValueError, RuntimeError):
            said = None
        if said is None:
            raise NotYet("is_spike() should return True or False")
        if said:
            alarms.add(at + start)
    spikes = [s for s in SPIKES[name] if s.first >= start]
    for spike in spikes:
        if not alarms & {spike.first, spike.first + 1}:
            raise NotYet(
                f"{about}: step {spike.first} is {spike.what}, and it passed unseen ({_around(losses, spike.first - start, start)})"
                + _why_missed(spikes, spike, losses, alarms, start)
            )
    false = sorted(a for a in alarms if not any(s.first <= a <= max(s.last, s.first + 1) for s in spikes))
    if false:
        first = false[0]
        raise NotYet(
            f"{about}: {len(false)} false alarm{'s' * (len(false) > 1)}, the first at step {first} "
            f"({_around(losses, first - start, start)})" + _why_false(losses, false, start)
        )


def _around(losses: tuple[float, ...], at: int, start: int) -> str:
    begin = max(0, at - 3)
    told = ", ".join("nan" if math.isnan(x) else f"{x:.2f}" for x in losses[begin : at + 2])
    return f"losses from step {begin + start} on: {told}"


def _why_missed(spikes: list[Spike], spike: Spike, losses: tuple[float, ...], alarms: set[int], start: int) -> str:
    if math.isnan(losses[spike.first - start]):
        return ": nan > x is False for every x, so ask math.isfinite() first"
    near = [s for s in spikes if 0 < spike.first - s.first < 20]
    if near and alarms & {near[0].first, near[0].first + 1}:
        return (
            f": the spike of step {near[0].first} is among your recent losses and makes them look wide. A median does not mind "
            "one bad neighbour, a mean and a standard deviation do"
        )
    if len(losses) > spike.first - start and losses[spike.first - start] < max(x for x in losses[:40] if x == x):
        return ": compare with the recent steps alone; at its start every run has losses as high as this"
    return ""


def _why_false(losses: tuple[float, ...], false: list[int], start: int) -> str:
    first = false[0] - start
    recent = sorted(x for x in losses[max(0, first - 20) : first] if x == x)
    if first < 10:
        return (
            ": nobody knows yet what is usual; say nothing in the first ten steps. And a limit that is a fixed number does not "
            "fit every run"
        )
    usual = recent[len(recent) // 2] if recent else math.nan
    if losses[first] < 0.85 * usual:
        return ": the loss is lower than usual there, and good news is no spike"
    if losses[first - 1] < 0.85 * usual:
        return ": the step before was lower than usual, by chance; compare with many steps, not with one"
    lowest = min((losses[a - start] for a in false if math.isfinite(losses[a - start])), default=math.inf)
    if all(x < lowest or at in false for at, x in enumerate(losses[20:], 20 + start)):
        return ": a fixed limit does not know what is usual for this run; compare with its recent losses"
    if any(not math.isfinite(x) for x in losses[:first]):
        return ": leave losses that are no number out of what you compare with"
    return ": ask for more distance from the usual loss, or take the usual one from more steps"
