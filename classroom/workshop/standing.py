"""Where one learner stands, made of their progress: counts, where they are stuck, the last sign of life."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from classroom.workshop.class_files import Found, shown
from course_lib.notebook.contents import LabExercise
from course_lib.notebook.progress import Progress

STUCK_TRIES = 5
MESSAGE_LENGTH = 100
STUCK_SHOWN = 2
AHEAD = 60.0  # seconds that a learner's clock may be ahead of ours


@dataclass(frozen=True)
class Stuck:
    """An exercise tried at least STUCK_TRIES times and not passed; `message` is what the check said last, cut."""

    lab: str
    title: str
    tries: int
    message: str


@dataclass(frozen=True)
class Told:
    """What is kept of a progress file: (passed, tried and not passed) of each known lab, no more than the page shows.

    `stuck` begins with the most tries. `newest` is the newest time in it, seconds since 1970; `unknown` counts exercises
    that this course does not have.
    """

    counts: dict[str, tuple[int, int]]
    stuck: tuple[Stuck, ...]
    newest: float | None
    unknown: int


def in_short(progress: Progress, labs: Mapping[str, Sequence[LabExercise]]) -> Told:
    """The part of a progress that the board shows. Only exercises of `labs` count: a file may claim any others."""
    counts, stuck, known = {}, [], 0
    for lab, exercises in labs.items():
        records = progress.labs.get(lab, {})
        passed = tried = 0
        for exercise in exercises:
            record = records.get(exercise.name)
            if record is None:
                continue
            known += 1
            passed += record.status == "passed"
            tried += record.status != "passed"
            if record.status != "passed" and record.tries >= STUCK_TRIES:
                stuck.append(Stuck(lab, exercise.title, min(record.tries, 999), shown(record.message, MESSAGE_LENGTH)))
        counts[lab] = (passed, tried)
    tried_once = [record for records in progress.labs.values() for record in records.values()]
    times = [record.first_tried for record in tried_once] + [record.first_passed for record in tried_once]
    times += [line.when for lines in progress.ledger.values() for line in lines.values()]
    seconds = [one for one in map(_seconds, times) if one is not None and one <= time.time() + AHEAD]
    unknown = sum(map(len, progress.labs.values())) - known
    stuck.sort(key=lambda one: -one.tries)
    return Told(counts, tuple(stuck), max(seconds, default=None), unknown)


def _seconds(text: str | None) -> float | None:
    """A time as the progress file writes it, in seconds since 1970; None for anything else."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError, OSError):
        return None


def passed(one: Found[Told]) -> int:
    """Exercises passed in all labs."""
    return sum(count for count, _ in one.told.counts.values()) if one.told else 0


def last_sign(one: Found[Told]) -> float | None:
    """Seconds since 1970 of the last try that we know of.

    The file holds the first try and the first pass of an exercise; later tries change nothing in it but the time at
    which it was written. So that time counts, too (copy files with their times: cp -p, rsync -t).
    """
    times = [when for when in (one.told.newest if one.told else None, one.changed) if when is not None]
    return max(times, default=None)


ORDERS = {
    "name": lambda one: one.key.casefold(),
    "passed": lambda one: (-passed(one), one.key.casefold()),
    "stuck": lambda one: (-max((s.tries for s in one.told.stuck), default=0) if one.told else 1, one.key.casefold()),
    "silent": lambda one: (last_sign(one) or 0.0, one.key.casefold()),
}
"""How the rows may be sorted: `stuck` and `silent` bring those to the top who may need somebody."""


def medians(found: Sequence[Found[Told]], labs: Mapping[str, Sequence[LabExercise]]) -> dict[str, float]:
    """The class's median of exercises passed in each lab; learners whose file cannot be read do not count."""
    told = [one.told for one in found if one.told]
    return {lab: statistics.median([one.counts[lab][0] for one in told] or [0]) for lab in labs}


def median_of_all(found: Sequence[Found[Told]]) -> float:
    """The class's median of exercises passed in all labs together."""
    return statistics.median([passed(one) for one in found if one.told] or [0])
