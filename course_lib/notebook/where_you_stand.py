"""Where the learner stands: exercises passed and numbers guessed, lesson by lesson, and what comes next."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

from course_lib.figures.style import Picture
from course_lib.notebook import contents, progress
from course_lib.notebook.contents import MapRow
from course_lib.notebook.page import Page
from course_lib.notebook.progress import GuessRecord

FEWEST_TO_COMPARE = 6
"""With fewer guesses than this nobody is told whether they got better."""
_CARD = "border: 1px solid #8888; border-radius: 8px; overflow: hidden; margin: 0; padding: 0"
_BUTTON = "display: inline-block; padding: 10px 18px; border-radius: 8px; background: #005A8F; color: #fff"
_COLUMNS = "grid-template-columns: repeat(auto-fill, minmax(230px, 1fr))"
_GRID = f"display: grid; {_COLUMNS}; gap: 14px; padding: 0; list-style: none"


@dataclass(frozen=True)
class Standing:
    """One lesson: how many exercises of its lab passed, and how its guesses went ("" for none)."""

    lesson: MapRow
    passed: int
    guesses: str


@dataclass(frozen=True)
class NextStep:
    """Where to go on: a notebook, its path from the repository's root ("" at the end), and a sentence about it."""

    path: str
    words: str

    def __str__(self) -> str:
        return f"{self.words} {self.path}".rstrip()


def standings(done: progress.Progress | None = None) -> list[Standing]:
    """One for each lesson; `done` None reads this learner's own progress."""
    done = progress.load() if done is None else done
    return [
        Standing(
            row,
            sum(_passed(done, row.name, exercise) for exercise in row.exercises),
            within(_guesses(done, row.name)),
        )
        for row in contents.map_rows()
    ]


def next_step(done: progress.Progress | None = None) -> NextStep:
    """The first exercise that is not passed, in the order of the lessons; its lesson, where nothing was done there."""
    done = progress.load() if done is None else done
    for row in contents.map_rows():
        for exercise in row.exercises:
            if not _passed(done, row.name, exercise):
                if done.labs.get(row.name) or _guesses(done, row.name):
                    words = f"Go on in lab {row.number}: {exercise.title}, about {exercise.minutes} minutes"
                    return NextStep(f"labs/{row.name}.ipynb", words)
                go = "Begin with" if row.number == 1 else "Go on with"
                return NextStep(f"lessons/{row.name}.ipynb", f"{go} lesson {row.number}: {row.title}")
    return NextStep("", "Every exercise of the course is passed.")


def where_you_stand(done: progress.Progress | None = None) -> Page:
    """The course map: a button to go on, and a card for each lesson. Its links start from the folder lessons/."""
    done = progress.load() if done is None else done
    shown, step, went = standings(done), next_step(done), how_guesses_went(done)
    go_on = html.escape(step.words)
    if step.path:
        go_on = f"<a href='../{step.path}' style='{_BUTTON}'>{go_on} &rarr;</a>"
    page = f"<p>{go_on}</p><p>{html.escape(went)}</p>{cards((s.lesson, _in_words(s)) for s in shown)}"
    lines = [f"{standing.lesson.name}: {_in_words(standing)}" for standing in shown]
    return Page(page, "\n".join([str(step), went, *lines]))


def cards(lessons: Iterable[tuple[MapRow, str]]) -> str:
    """The lessons as a list of cards, in HTML: picture, title, question, minutes, lab, and a line about each ("" for none)."""
    return f"<ol class='lessons' style='{_GRID}'>{''.join(_card(row, line) for row, line in lessons)}</ol>"


def _card(row: MapRow, line: str) -> str:
    drawing = (contents.ROOT / "lessons" / "pictures" / f"{row.name}.svg").read_bytes()
    title = ElementTree.fromstring(drawing).findtext("{http://www.w3.org/2000/svg}title", "").strip()
    lesson = f"<a class='lesson' href='{row.name}.ipynb'><b>{row.number}. {html.escape(row.title)}</b></a>"
    lab = f"<a href='../labs/{row.name}.ipynb'>lab {row.number}</a>, {row.lab_minutes} minutes"
    solution = f"<a href='../solutions/{row.name}.ipynb'>solution</a>"
    needs = f"{row.minutes} minutes · {html.escape(row.needs)} · {lab} · {solution}"
    paragraphs = {"question": html.escape(row.question), "needs": needs, "done": html.escape(line)}
    below = "".join(f"<p class='{name}' style='margin: 4px 0'>{text}</p>" for name, text in paragraphs.items() if text)
    picture = Picture(drawing, title, width=760).html
    return f"<li style='{_CARD}'>{picture}<div style='padding: 4px 14px 12px'>{lesson}{below}</div></li>"


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


def _in_words(standing: Standing) -> str:
    passed = f"{standing.passed} of {len(standing.lesson.exercises)} exercises passed"
    return f"{passed}. Guesses: {standing.guesses}" if standing.guesses else passed


def _guesses(done: progress.Progress, lab: str) -> list[GuessRecord]:
    """Those of the lesson, and of what goes deeper into it."""
    notebooks = [guesses for name, guesses in done.guesses.items() if name[:2] == lab[:2]]
    return [guess for guesses in notebooks for guess in guesses.values()]


def _passed(done: progress.Progress, lab: str, exercise: contents.LabExercise) -> bool:
    record = done.labs.get(lab, {}).get(exercise.name)
    return record is not None and record.status == "passed"
