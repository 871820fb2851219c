"""Where the learner stands: exercises passed and predictions kept, lesson by lesson, and what comes next."""

from __future__ import annotations

import statistics
from pathlib import Path

from course_lib.notebook import contents, progress
from course_lib.notebook.contents import ROOT


def rows(done: progress.Progress | None = None, root: Path = ROOT) -> list[dict[str, str]]:
    """One row a lesson, for a table.

    Args:
        done: a learner's progress; None reads this learner's own.
        root: the course's repository.

    Returns:
        lesson, exercises passed (of how many), predictions that were measured, and the median distance of the
        measurements from them, in percent of the prediction.

    Raises:
        ValueError: `root` holds no labs.
    """
    done = progress.load() if done is None else done
    return [
        {
            "lesson": lab,
            "exercises passed": f"{_passed(done, lab, exercises)} of {len(exercises)}",
            **_predictions(done, lab),
        }
        for lab, exercises in contents.labs(root).items()
    ]


def next_step(done: progress.Progress | None = None, root: Path = ROOT) -> str:
    """One sentence: the first exercise that is not passed, in the order of the lessons."""
    done = progress.load() if done is None else done
    for lab, exercises in contents.labs(root).items():
        records = done.labs.get(lab, {})
        for exercise in exercises:
            if exercise.name not in records or records[exercise.name].status != "passed":
                if not records and not done.ledger.get(lab):
                    return f"Next: lesson {int(lab[:2])}, lessons/{lab}.ipynb."
                return f"Next: “{exercise.title}” in labs/{lab}.ipynb, about {exercise.minutes} minutes."
    return "Every exercise of the course is passed."


def _passed(done: progress.Progress, lab: str, exercises: list[contents.LabExercise]) -> int:
    records = done.labs.get(lab, {})
    return sum(one.name in records and records[one.name].status == "passed" for one in exercises)


def _predictions(done: progress.Progress, lesson: str) -> dict[str, str]:
    pairs = [
        (line.predicted, line.measured)
        for line in done.ledger.get(lesson, {}).values()
        if line.predicted is not None and line.measured is not None
    ]
    off = [100 * abs(measured - predicted) / abs(predicted) for predicted, measured in pairs if predicted]
    return {
        "predictions measured": str(len(pairs)) if pairs else "",
        "off by (median)": f"{statistics.median(off):.2g} %" if off else "",
    }
