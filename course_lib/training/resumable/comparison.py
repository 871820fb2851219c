"""Compare the records of an undisturbed and a resumed run, and name the cause of the first difference.

>>> compare_resume("runs/undisturbed", "runs/resumed")
['dropout was 0.1 and is 0.0 since the resume at step 10: the losses part there (4.213 and 4.198).']

A loss curve does not show it: losses get lower, or stay as good, when dropout is lost, the learning rate warms up again or
batches are seen twice. So everything that a resume must restore is compared with what it was at the same step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from course_lib.training.resumable.journal import Event, read, steps_that_count

# what may be another on purpose without moving a bit (as long as the gradients are added exactly)
_HARMLESS = ("world_size",)
_OF_THE_MACHINE = ("device", "threads", "torch", "machine")


@dataclass(frozen=True)
class Record:
    """What one run noted: its last start, its updates, and its state at each save, by updates done."""

    start: Event
    steps: dict[int, Event]
    saved: dict[int, Event]

    @property
    def resumed_at(self) -> int:
        return self.start["step"]


def read_record(run: Any) -> Record:
    """The record of a run: a folder with its journal, the journal's events, or the Outcome of ``resumable.train``.

    Raises ValueError where nothing was recorded.
    """
    about = run
    if hasattr(run, "extra"):
        run = run.extra.get("record", [])
    events: Iterable[Event] = read(run) if isinstance(run, (str, os.PathLike)) else run
    events = [event for event in events if isinstance(event, dict) and "event" in event]
    starts = [event for event in events if event["event"] == "start"]
    steps = steps_that_count(events)
    if not starts or not steps:
        raise ValueError(
            f"{str(about)[:100]!r} has no record of a run: give its folder of checkpoints, or its Outcome."
        )
    saved = {event["step"]: event for event in events if event["event"] == "saved"}
    return Record(starts[-1], steps, saved)


def compare_resume(before: Any, after: Any) -> list[str]:
    """Compare an uninterrupted run with one that was resumed; empty where they are equal bit for bit.

    Args:
        before: the uninterrupted run, as ``read_record`` takes it.
        after: the resumed one; its last resume is looked at.

    Returns:
        One sentence a difference, the first cause first. Causes come before what follows from them.
    """
    old, new = read_record(before), read_record(after)
    at = new.resumed_at
    if at == 0:
        raise ValueError("The second run was never resumed: its last start is at step 0.")
    both = sorted(set(old.steps) & set(new.steps))
    if not both:
        raise ValueError("The two runs have no step in common.")
    parts = next((step for step in both if old.steps[step]["loss"] != new.steps[step]["loss"]), None)
    found = _changed_settings(old, new)
    then = old.saved.get(at)
    if then is not None:
        found += _lost_state(then["state"], new.start["state"], at)
        found += _lost_place(then, new.start, at)
    found += _step_by_step(old, new, both, told=bool(found))
    if parts is None and not found:
        return []
    where = "the losses are equal all the same"
    if parts is not None:
        ours, theirs = old.steps[parts]["loss"], new.steps[parts]["loss"]
        place = "there" if parts == at else f"at step {parts}"
        where = f"the losses part {place} ({_two(ours, theirs)})"
    if not found:
        return [_unexplained(old, new, at, parts, where, known=then is not None)]
    return [f"{found[0]}: {where}.", *(f"{sentence}." for sentence in found[1:])]


def _changed_settings(old: Record, new: Record) -> list[str]:
    ours, theirs = old.start["config"], new.start["config"]
    return [
        f"{name} was {ours.get(name)} and is {theirs.get(name)} since the resume at step {new.resumed_at}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name) and name not in (*_HARMLESS, *_OF_THE_MACHINE)
    ]


def _lost_state(ours: dict[str, str], theirs: dict[str, str], at: int) -> list[str]:
    """Tensors that did not come back, those of the model and those of the optimizer told apart."""
    found = []
    for kind, is_it in (("model", lambda name: " / " not in name), ("optimizer", lambda name: " / " in name)):
        names = [name for name in ours if is_it(name)]
        gone = [name for name in names if name not in theirs]
        other = [name for name in names if name in theirs and ours[name] != theirs[name]]
        if gone and len(gone) == len(names):
            found.append(
                f"the {kind}'s state did not come back at step {at}: it began anew, without any of {len(gone)} tensors"
            )
        elif gone or other:
            found.append(
                f"{len(gone + other)} of {len(names)} tensors of the {kind} came back changed at step {at}, the first "
                f"of them {(gone + other)[0]}"
            )
    return found


def _lost_place(then: Event, now: Event, at: int) -> list[str]:
    """Numbers that say where the run stood: random numbers, data, schedule."""
    found = []
    if then["drawn"] != now["drawn"]:
        found.append(
            f"the random numbers were not restored at step {at}: their streams stood at {then['drawn']} and go on from "
            f"{now['drawn']}, so dropout zeroes other numbers"
        )
    if then["position"] != now["position"]:
        found.append(
            f"the data's position was not restored at step {at}: it stood at batch {then['position']} and goes on from "
            f"{now['position']}, so {'batches are seen twice' if now['position'] < then['position'] else 'some are left out'}"
        )
    if then["scheduler"] != now["scheduler"]:
        found.append(
            f"the learning-rate schedule was not restored at step {at}: it had counted {then['scheduler']} updates and "
            f"counts from {now['scheduler']}"
        )
    return found


def _step_by_step(old: Record, new: Record, both: list[int], *, told: bool) -> list[str]:
    """The first update with another batch, random numbers or learning rate, where the resume has not told it already."""
    found = []
    for name, what in (("batch", "another batch"), ("drawn", "other random numbers"), ("lr", "another learning rate")):
        step = next((step for step in both if old.steps[step].get(name) != new.steps[step].get(name)), None)
        if step is not None and not told:
            ours, theirs = old.steps[step].get(name), new.steps[step].get(name)
            found.append(f"step {step} was done with {what} ({ours} and {theirs})")
    return found


def _unexplained(old: Record, new: Record, at: int, parts: int | None, where: str, *, known: bool) -> str:
    ours, theirs = old.start["config"], new.start["config"]
    ranks = f"{ours.get('world_size')} and {theirs.get('world_size')}"
    if not theirs.get("exact") and ours.get("world_size") != theirs.get("world_size"):
        return f"The number of ranks ({ranks}) changes the order in which an all-reduce adds: {where}."
    for name in _OF_THE_MACHINE:
        if ours.get(name) != theirs.get(name):
            return (
                f"{name} was {ours.get(name)} and is {theirs.get(name)}, whose kernels may round differently: {where}."
            )
    if parts is not None and parts < at:
        return f"The runs were two before the resume at step {at}: {where}."
    if not known:
        return f"The uninterrupted run saved nothing at step {at}, so the states cannot be compared: {where}."
    return f"All that is recorded came back at step {at}, and yet {where}: look for what no record holds."


def _two(first: float, second: float) -> str:
    """Both numbers with as many digits as tell them apart."""
    for digits in range(4, 18):
        if f"{first:.{digits}g}" != f"{second:.{digits}g}":
            break
    return f"{first:.{digits}g} and {second:.{digits}g}"
