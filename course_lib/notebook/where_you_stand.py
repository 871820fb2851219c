"""Where the learner stands: exercises passed and numbers guessed, lesson by lesson, and what comes next."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from course_lib.notebook import contents, progress
from course_lib.notebook.progress import GuessRecord

FEWEST_TO_COMPARE = 6
"""With fewer guesses than this nobody is told whether they got better."""


def rows(done: progress.Progress | None = None) -> list[dict[str, str]]:
    """One row a lesson, for a table; `done` None reads this learner's own progress. Raises ValueError without labs."""
    done = progress.load() if done is None else done
    return [
        {
            "lesson": lab,
            "exercises passed": f"{sum(_passed(done, lab, one) for one in exercises)} of {len(exercises)}",
            "guesses": within(_guesses(done, lab)),
        }
        for lab, exercises in contents.labs().items()
    ]


def next_step(done: progress.Progress | None = None) -> str:
    """One sentence: the first exercise that is not passed, in the order of the lessons."""
    done = progress.load() if done is None else done
    for lab, exercises in contents.labs().items():
        for exercise in exercises:
            if not _passed(done, lab, exercise):
                if not done.labs.get(lab) and not _guesses(done, lab):
                    return f"Next: lesson {int(lab[:2])}, lessons/{lab}.ipynb."
                return f"Next: “{exercise.title}” in labs/{lab}.ipynb, about {exercise.minutes} minutes."
    return "Every exercise of the course is passed."


def how_guesses_went(done: progress.Progress | None = None) -> str:
    """One sentence about all guesses so far: the last ones beside the first ones, ten each where there are twenty."""
    done = progress.load() if done is None else done
    every = [record for records in done.guesses.values() for record in records.values() if record.factor]
    every.sort(key=lambda record: record.when)
    if not every:
        return "No guess of yours has been measured yet."
    if len(every) < FEWEST_TO_COMPARE:
        return f"Your guesses so far: {within(every)}."
    many = min(10, len(every) // 2)
    last, first = (f"a factor of {_typical(part)}" for part in (every[-many:], every[:many]))
    return f"Half of your last {many} guesses were within {last}; of the first {many}, half were within {first}."


def within(records: Iterable[GuessRecord]) -> str:
    """'4, half of them within a factor of 1.3': how many were measured, and how good they were; "" for none."""
    factors = [record for record in records if record.factor]
    if len(factors) < 2:
        return f"1, within a factor of {_typical(factors)}" if factors else ""
    return f"{len(factors)}, half of them within a factor of {_typical(factors)}"


def _typical(records: list[GuessRecord]) -> str:
    """The factor that at least half of them lie within, rounded up, so that the sentence is true."""
    middle = statistics.median_high(record.factor or 1.0 for record in records)
    step = 0.01 if middle < 1.1 else 0.1 if middle < 10 else 1
    return f"{math.ceil(middle / step - 1e-9) * step:,.4g}"


def _guesses(done: progress.Progress, lab: str) -> list[GuessRecord]:
    """Those of the lesson, and of what goes deeper into it."""
    notebooks = [guesses for name, guesses in done.guesses.items() if name[:2] == lab[:2]]
    return [guess for guesses in notebooks for guess in guesses.values()]


def _passed(done: progress.Progress, lab: str, exercise: contents.LabExercise) -> bool:
    record = done.labs.get(lab, {}).get(exercise.name)
    return record is not None and record.status == "passed"
