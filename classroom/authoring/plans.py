"""What an instructor plans with: the notes on lessons, the minutes of a lesson by section, the tracks of lessons/course.toml.

A note is site/instructors/NN_name.md: YAML in front, prose behind. In front stand `skip_first` (sections in the order in
which to drop them when time is short, each with `because`) and `lab_core` (the lab's exercises to keep).

A section costs a minute for 200 words to read, 3 seconds a line of code, 20 seconds a cell to run and look at, a minute
per figure. These costs only set the proportions: they share out the minutes that the lesson states.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.notebook import contents
from course_lib.notebook.contents import ROOT, MapRow, Section

WORDS_A_MINUTE, SECONDS_A_LINE, SECONDS_A_CELL, SECONDS_A_FIGURE = 200, 3, 20, 60


@dataclass(frozen=True)
class Skip:
    """A section that may be dropped, by its heading, and why it may."""

    section: str
    because: str


@dataclass(frozen=True)
class Note:
    """One note; `text` is what stands behind the YAML."""

    skip_first: list[Skip]
    lab_core: list[str]
    text: str


@dataclass
class Step:
    """A section with its share of the lesson: `minutes`, and `skipped` with the reason where it is dropped."""

    section: Section
    minutes: int
    skipped: str = ""


@dataclass(frozen=True)
class Part:
    """A lesson, an exercise of a lab or the lab's core, or a pause. `dropped`: what a short lesson leaves out."""

    kind: str  # "lesson", "lab" or "pause"
    title: str
    minutes: int
    dropped: Sequence[str] = ()


@dataclass(frozen=True)
class Track:
    """Sessions, each a day or a week, of parts; a session may take `minutes`."""

    name: str
    title: str
    who: str
    session: str
    minutes: int
    sessions: list[list[Part]]


def note(number: int, root: Path = ROOT) -> Note:
    """The note on a lesson. Raises ValueError for a lesson that does not exist, or a note that cannot be understood."""
    import yaml

    path = root / "site" / "instructors" / f"{contents.find(number, 'lessons', root).stem}.md"
    try:
        _, front, text = path.read_text(encoding="utf-8").split("---\n", 2)
        given = yaml.safe_load(front)
        return Note([Skip(**skip) for skip in given["skip_first"]], given["lab_core"], text.strip())
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} must begin with YAML of skip_first and lab_core: {error}") from error


def share(minutes: int, weights: Sequence[float]) -> list[int]:
    """`minutes` in whole parts of at least 1 that sum to it, the rest of each in proportion to its weight."""
    rest = minutes - len(weights)
    if rest < 0:
        raise ValueError(f"{minutes} minutes cannot be shared among {len(weights)} sections")
    ends = [round(rest * sum(weights[:k]) / sum(weights)) for k in range(len(weights) + 1)]
    return [1 + end - begin for begin, end in zip(ends, ends[1:], strict=False)]


def cost(section: Section) -> float:
    """Minutes by the rule above, before they are scaled to what the lesson states."""
    seconds = SECONDS_A_LINE * section.lines + SECONDS_A_CELL * section.cells + SECONDS_A_FIGURE * section.figures
    return section.words / WORDS_A_MINUTE + seconds / 60


def shorten(
    sections: Sequence[Section], minutes: int, skips: Sequence[Skip] = (), limit: int | None = None
) -> list[Step]:
    """Each section's minutes; sections of `skips` are dropped in that order until the rest takes at most `limit` minutes.

    A section that is dropped takes the sub-sections below it along. Raises ValueError for a heading that is not there.
    """
    steps = [Step(*both) for both in zip(sections, share(minutes, [cost(one) for one in sections]), strict=True)]
    titles = [section.title for section in sections]
    for skip in skips:
        if skip.section not in titles:
            raise ValueError(f"the note skips {skip.section!r}, which is no heading of the lesson")
        if limit is None or taken(steps) <= limit:
            continue
        first = titles.index(skip.section)
        steps[first].skipped = skip.because
        for below in steps[first + 1 :]:
            if below.section.level <= sections[first].level:
                break
            below.skipped = skip.because
    return steps


def taken(steps: Sequence[Step]) -> int:
    """Minutes of what is not skipped."""
    return sum(step.minutes for step in steps if not step.skipped)


def lesson(row: MapRow, limit: int | None = None, root: Path = ROOT) -> list[Step]:
    """A lesson's sections, with those skipped that its note names until it takes at most `limit` minutes."""
    sections = contents.sections(contents.find(row.number, "lessons", root))
    return shorten(sections, row.minutes, note(row.number, root).skip_first, limit)


def core_minutes(row: MapRow, root: Path = ROOT) -> int:
    """Minutes of the lab's core. Raises ValueError where the note names an exercise that is not there."""
    minutes = {exercise.title: exercise.minutes for exercise in row.exercises}
    core = note(row.number, root).lab_core
    if unknown := set(core) - set(minutes):
        raise ValueError(f"the note's core of lab {row.number} names {min(unknown)!r}, which is no heading of the lab")
    return sum(minutes[title] for title in core)


def core_exercises(row: MapRow, root: Path = ROOT) -> str:
    """'exercises 1, 2, 5': the lab's core by number."""
    return f"exercises {', '.join(title.partition('.')[0] for title in note(row.number, root).lab_core)}"


def tracks(root: Path = ROOT) -> dict[str, Track]:
    """All tracks by name. Raises ValueError where one names a lesson or an exercise that does not exist."""
    course, rows = _course(root)
    for track in course["tracks"]:
        track["sessions"] = [[_part(given, rows, root) for given in session] for session in track["sessions"]]
    return {track["name"]: Track(**track) for track in course["tracks"]}


def paths(root: Path = ROOT) -> list[tuple[str, str, str, int]]:
    """The learners' paths: title, what they take (links from lessons/), a word about it, minutes.

    Raises ValueError where one names a lesson or a section that does not exist.
    """
    course, rows = _course(root)
    found = []
    for path in course["paths"]:
        links, minutes = [], 0
        for given in path["take"]:
            row, sections = _row(given, rows), given.get("sections", [])
            if "lab" in given:
                links.append(f"[lab {row.number}](../labs/{row.name}.ipynb), {core_exercises(row, root)}")
                minutes += core_minutes(row, root)
                continue
            parts = by_section(lesson(row, root=root))
            if unknown := set(sections) - set(parts):
                raise ValueError(
                    f"lessons/course.toml takes section {min(unknown)} of lesson {row.number}: there is none"
                )
            only = f", section{'s' * (len(sections) > 1)} {', '.join(map(str, sections))}" if sections else ""
            links.append(f"[lesson {row.number}]({row.name}.ipynb){only}")
            minutes += sum(parts[number] for number in sections) or row.minutes
        found.append((path["title"], "; ".join(links), path["words"], minutes))
    return found


def by_section(steps: Sequence[Step]) -> dict[int, int]:
    """Minutes of the numbered sections of a lesson, each with what stands below it: '## 3. …' is 3."""
    minutes: dict[int, int] = {}
    number = 0
    for step in steps:
        if step.section.level < 3:
            number = int(digits) if (digits := step.section.title.partition(".")[0]).isdigit() else 0
        if number:
            minutes[number] = minutes.get(number, 0) + step.minutes
    return minutes


def _course(root: Path) -> tuple[dict[str, Any], dict[int, MapRow]]:
    """lessons/course.toml, and its lessons by number."""
    course = tomllib.loads((root / "lessons" / "course.toml").read_text(encoding="utf-8"))
    return course, {row.number: row for row in contents.map_rows(root)}


def _row(given: Mapping[str, Any], rows: Mapping[int, MapRow]) -> MapRow:
    """The lesson that a part of a track or a path is about."""
    row = rows.get(given.get("lesson") or given["lab"])
    if row is None:
        raise ValueError(f"lessons/course.toml has a part {given}, and there is no such lesson")
    return row


def _part(given: Mapping[str, Any], rows: Mapping[int, MapRow], root: Path) -> Part:
    if "pause" in given:
        return Part("pause", given["pause"], given["minutes"])
    row = _row(given, rows)
    if "lesson" in given:
        steps = lesson(row, given.get("minutes"), root)
        dropped = [step.section.title for step in steps if step.skipped]
        return Part("lesson", f"{row.number}. {row.title}", max(given.get("minutes", 0), taken(steps)), dropped)
    if "exercise" not in given:
        return Part("lab", core_exercises(row, root), core_minutes(row, root))
    exercise = next((exercise for exercise in row.exercises if exercise.name == given["exercise"]), None)
    if exercise is None:
        raise ValueError(f"lessons/course.toml has a track with {given}, and the lab has no such exercise")
    return Part("lab", exercise.title, exercise.minutes)
