"""What the map, the site and the class commands need from the notebooks without running them: sections, exercises, minutes.

Read as JSON, so that a page about the class costs no import of PyTorch.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from course_lib.figures.stored_figures import pictures

ROOT = Path(__file__).resolve().parents[2]  # the repository
_HEADING = re.compile(r"^(#{1,3}) +(.+?) *$")
_CHECK = re.compile(r"^[^#\n]*\bcheck\.(\w+)\(", re.MULTILINE)
_STATED = re.compile(r"\*difficulty (\d) of 5 · importance (\d) of 5 · (\d+) minutes\*")
ABOUT_MINUTES = re.compile(r"\babout (\d+) minutes", re.IGNORECASE)


@dataclass
class Section:
    """A heading of a notebook and what stands below it until the next one.

    Attributes:
        title: the heading's text, without its #.
        level: 1 for the notebook's title, 2 or 3 below it.
        words: words of prose and tables to read.
        lines: lines of code that are not empty.
        cells: code cells to run.
        figures: pictures among the stored outputs.
    """

    title: str
    level: int
    words: int = 0
    lines: int = 0
    cells: int = 0
    figures: int = 0


@dataclass(frozen=True)
class LabExercise:
    """One exercise of a lab: `name` is that of its check, `minutes` what its heading states."""

    name: str
    title: str
    minutes: int
    difficulty: int
    importance: int


@dataclass(frozen=True)
class MapRow:
    """A lesson as the course map shows it: `name` is that of its notebooks, `minutes` are those that it states itself."""

    number: int
    name: str
    title: str
    question: str
    needs: str
    minutes: int
    exercises: list[LabExercise]  # of its lab, in order

    @property
    def lab_minutes(self) -> int:
        """Of the whole lab, as its exercises state them."""
        return sum(exercise.minutes for exercise in self.exercises)


def find(number: int, folder: str, root: Path = ROOT) -> Path:
    """The notebook of lesson `number` in lessons/, labs/ or solutions/. Raises ValueError if there is none."""
    found = sorted((root / folder).glob(f"{number:02}_*.ipynb"))
    if not found or number < 1:
        known = ", ".join(str(int(path.name[:2])) for path in sorted((root / folder).glob("0[1-9]_*.ipynb")))
        raise ValueError(f"{folder}/ has no lesson {number}; it has {known or 'no notebooks'}")
    return found[0]


def sections(path: Path) -> list[Section]:
    """The headings of a notebook, in order. Raises ValueError for a file that is not a notebook."""
    found: list[Section] = []
    for cell in _cells(path):
        if cell["cell_type"] == "markdown":
            for part in headed_parts(_source(cell)):
                first, _, below = part.partition("\n")
                if heading := _HEADING.match(first):
                    found.append(Section(heading[2], len(heading[1])))
                if found:
                    found[-1].words += len((below if heading else part).split())
        elif found:
            found[-1].cells += 1
            found[-1].lines += sum(bool(line.strip()) for line in _source(cell).splitlines())
            found[-1].figures += sum(len(pictures(output)) for output in cell["outputs"])
    return found


def headed_parts(source: str) -> list[str]:
    """A Markdown text cut before its headings of level 1 to 3; a # inside a fence is no heading."""
    parts, fenced = [""], False
    for line in source.splitlines(keepends=True):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and re.match(r"#{1,3} ", line):
            parts.append("")
        parts[-1] += line
    return [part for part in parts if part.strip()]


def exercises(path: Path) -> list[LabExercise]:
    """The exercises of a lab or a solution, in order: each heading with minutes, and the check called below it."""
    found: list[LabExercise] = []
    waiting: tuple[str, int, int, int] | None = None
    for cell in _cells(path):
        source = _source(cell)
        if cell["cell_type"] == "markdown":
            if stated := _STATED.search(source):
                title = [m[2] for line in source[: stated.start()].splitlines() if (m := _HEADING.match(line))][-1]
                waiting = (title, int(stated[3]), int(stated[1]), int(stated[2]))
        elif waiting and (names := [name for name in _CHECK.findall(source) if name != "score"]):
            found.append(LabExercise(names[0], *waiting))
            waiting = None
    return found


def labs(root: Path = ROOT) -> dict[str, list[LabExercise]]:
    """All labs, '05_deepspeed_zero' -> its exercises; from solutions/, which nobody works in, or else from labs/.

    Raises ValueError where there are neither.
    """
    folder = "solutions" if any((root / "solutions").glob("0[1-9]_*.ipynb")) else "labs"
    found = {path.stem: exercises(path) for path in sorted((root / folder).glob("0[1-9]_*.ipynb"))}
    if not found:
        raise ValueError(f"{root} has neither solutions/ nor labs/: run this from a copy of the course's repository")
    return found


def map_rows(root: Path = ROOT) -> list[MapRow]:
    """The lessons of lessons/course.toml, in order. Raises ValueError where one has no notebook or states no minutes."""
    listed = tomllib.loads((root / "lessons" / "course.toml").read_text(encoding="utf-8"))["lessons"]
    names = [path.stem for path in sorted((root / "lessons").glob("0[1-9]_*.ipynb"))]
    if [lesson["name"] for lesson in listed] != names:
        raise ValueError(
            f"lessons/course.toml lists {', '.join(lesson['name'] for lesson in listed)}, and the folder holds "
            f"{', '.join(names)}: give each lesson its entry"
        )
    in_labs = labs(root)
    return [
        MapRow(
            number,
            minutes=stated_minutes(root / "lessons" / f"{lesson['name']}.ipynb"),
            exercises=in_labs[lesson["name"]],
            **lesson,
        )
        for number, lesson in enumerate(listed, 1)
    ]


def stated_minutes(path: Path) -> int:
    """The minutes that a notebook's first cell states. Raises ValueError where it states none."""
    stated = ABOUT_MINUTES.search(_source(_cells(path)[0]))
    if not stated:
        raise ValueError(f"the first cell of {path.name} does not say about how many minutes it takes")
    return int(stated[1])


def _cells(path: Path) -> list[dict]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path.name} is not a notebook ({error}): bring it back from the course's repository"
        ) from error


def _source(cell: dict) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)
