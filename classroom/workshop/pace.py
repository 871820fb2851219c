"""``beyond class pace``: the minutes of a lesson by section, and what to skip when time is short.

The rule: a section costs a minute for 200 words to read, 3 seconds a line of code, 20 seconds a cell to run and look
at, a minute per figure. These costs only set the proportions: they share out the lesson's minutes, as the course map
states them, in whole minutes and at least one per section.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from classroom.authoring import notes
from course_lib.notebook import contents
from course_lib.notebook.contents import ROOT, Section
from course_tools.command_line import ArgumentParser, reports_errors

WORDS_A_MINUTE, SECONDS_A_LINE, SECONDS_A_CELL, SECONDS_A_FIGURE = 200, 3, 20, 60


@dataclass
class Step:
    """A section with its share of the lesson: `minutes`, and `skipped` with the reason where it is dropped."""

    section: Section
    minutes: int
    skipped: str | None = None


def cost(section: Section) -> float:
    """Minutes by the rule above, before they are scaled to what the lesson states."""
    seconds = SECONDS_A_LINE * section.lines + SECONDS_A_CELL * section.cells + SECONDS_A_FIGURE * section.figures
    return section.words / WORDS_A_MINUTE + seconds / 60


def share(minutes: int, weights: Sequence[float]) -> list[int]:
    """`minutes` in whole parts of at least 1 that sum to it, the rest of each in proportion to its weight.

    Raises ValueError when there are more parts than minutes.
    """
    rest = minutes - len(weights)
    if rest < 0:
        raise ValueError(
            f"{minutes} minutes cannot be shared among {len(weights)} sections: state at least {len(weights)}"
        )
    total = sum(weights) or 1.0
    exact = [rest * weight / total for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: exact[i] - parts[i], reverse=True)
    for i in by_remainder[: rest - sum(parts)]:
        parts[i] += 1
    return [1 + part for part in parts]


def plan(
    sections: list[Section], minutes: int, skips: Sequence[notes.Skip] = (), limit: int | None = None
) -> list[Step]:
    """Each section's minutes; sections of `skips` are dropped in that order until the rest takes at most `limit` minutes.

    A section that is dropped takes the sub-sections below it along. Raises ValueError for a heading that is not there.
    """
    steps = [Step(*both) for both in zip(sections, share(minutes, [cost(one) for one in sections]), strict=True)]
    for skip in skips:
        index = next((i for i, step in enumerate(steps) if step.section.title == skip.section), None)
        if index is None:
            raise ValueError(
                f"the note skips {skip.section!r}, which is no heading of the lesson: write it as it stands there"
            )
        if limit is None or taken(steps) <= limit:
            continue
        steps[index].skipped = steps[index].skipped or skip.because
        for below in steps[index + 1 :]:
            if below.section.level <= steps[index].section.level:
                break
            below.skipped = below.skipped or skip.because
    return steps


def taken(steps: Sequence[Step]) -> int:
    """Minutes of what is not skipped."""
    return sum(step.minutes for step in steps if step.skipped is None)


def clock(minute: int) -> str:
    """Minutes since midnight as '09:30'."""
    return f"{minute // 60 % 24:02}:{minute % 60:02}"


def minute_of(text: str) -> int:
    """'9:30' as minutes since midnight. Raises ValueError for anything that is no time of day."""
    match = re.fullmatch(r"(\d{1,2}):(\d\d)", text)
    if not match or int(match[1]) > 23 or int(match[2]) > 59:
        raise ValueError(f"a time of day is written like 09:30, not {text!r}")
    return int(match[1]) * 60 + int(match[2])


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the plan. Returns 1 when it does not fit into --minutes, 2 for bad input."""
    parser = ArgumentParser(prog="beyond class pace", description="Minutes by section, and what to skip.")
    parser.add_argument("lesson", type=int, nargs="?", help="1 to 8; without it, one line for each lesson")
    parser.add_argument("--minutes", type=int, help="what you have for the lesson, without its lab")
    parser.add_argument("--start", metavar="HH:MM", help="when it begins: shows clock times")
    options = parser.parse_args(argv)
    start = None if options.start is None else minute_of(options.start)
    if options.minutes is not None and options.minutes < 1:
        raise ValueError("--minutes must be above 0")
    if options.lesson is None:
        print("\n".join(overview()))
        return 0
    lines, fits = lesson(options.lesson, options.minutes, start)
    print("\n".join(lines))
    return 0 if fits else 1


def overview(root: Path = ROOT) -> list[str]:
    """A line for each lesson."""
    rows = [
        f"{row.minutes:6} {row.lab_minutes:5}  {contents.sections(contents.find(row.number, 'lessons', root))[0].title}"
        for row in contents.map_rows(root)
    ]
    return ["lesson   lab  (minutes)", *rows, "pace 5 shows one by section."]


def lesson(number: int, limit: int | None, start: int | None, root: Path = ROOT) -> tuple[list[str], bool]:
    """The plan of one lesson as lines, and whether it fits into `limit` minutes. Raises ValueError as `plan` does."""
    sections = contents.sections(contents.find(number, "lessons", root))
    note = notes.read(number, root)
    minutes = next(row.minutes for row in contents.map_rows(root) if row.number == number)
    steps = plan(sections, minutes, note.skip_first if note else (), limit)
    needed, now = taken(steps), start
    lines = []
    for step in steps:
        when = "" if now is None else f"{clock(now) if step.skipped is None else '  -  '}  "
        how_long = f"{step.minutes:3} min" if step.skipped is None else "   skip"
        lines.append(f"{when}{how_long}  {'  ' * max(step.section.level - 2, 0)}{step.section.title}")
        if step.skipped:
            lines.append(f"{' ' * len(when)}           because {step.skipped}")
        if now is not None and step.skipped is None:
            now += step.minutes
    dropped = "" if needed == minutes else f"; {minutes - needed} of the {minutes} skipped"
    lines.append(f"{needed} minutes{dropped}" + ("" if now is None else f"; the lab from {clock(now)}"))
    if limit is not None and note is None:
        lines.append(f"What to skip stands in the note on lesson {number}, which is not written yet.")
    elif limit is not None and needed > limit:
        lines.append(
            f"{needed - limit} minutes too long, with all skipped that the note names: move the rest to the lab's time."
        )
    elif limit is not None and needed < limit:
        lines.append(f"{limit - needed} min left for questions.")
    return [*lines, "", *lab_lines(number, note, now, root)], limit is None or needed <= limit


def lab_lines(number: int, note: notes.Note | None, now: int | None, root: Path = ROOT) -> list[str]:
    """The lab's exercises with the minutes of their headings; * marks the core. Raises ValueError for a false core."""
    found = contents.exercises(contents.find(number, "labs", root))
    core = note.lab_core if note else []
    for title in core:
        if title not in [one.title for one in found]:
            raise ValueError(
                f"the note's core exercise {title!r} is no heading of the lab: write it as it stands there"
            )
    lines = [f"The lab, {sum(one.minutes for one in found)} minutes" + (", * its core:" if core else ":")]
    for one in found:
        when = "" if now is None else f"{clock(now)}  "
        lines.append(
            f"{when}{one.minutes:3} min  {'* ' if one.title in core else ''}{one.title} (difficulty {one.difficulty} of 5)"
        )
        now = None if now is None else now + one.minutes
    if core:
        lines.append(f"{sum(one.minutes for one in found if one.title in core)} minutes for the core alone")
    return lines
