"""The instructor's notes, site/instructors/NN_name.md: YAML in front, prose behind.

In front stand `skip_first` (sections in the order in which to drop them when time is short,
each with `because`) and `lab_core` (the lab's exercises to keep).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.notebook import contents
from course_lib.notebook.contents import ROOT
from course_tools.command_line import ArgumentParser, reports_errors


@dataclass(frozen=True)
class Skip:
    """A section that may be dropped, by its heading, and why it may."""

    section: str
    because: str


@dataclass(frozen=True)
class Note:
    """One note; `text` is what stands behind the YAML."""

    path: Path
    skip_first: list[Skip] = field(default_factory=list)
    lab_core: list[str] = field(default_factory=list)
    text: str = ""


def note_path(number: int, root: Path = ROOT) -> Path:
    """Where the note on lesson `number` lies, or will. Raises ValueError for a lesson that does not exist."""
    return root / "site" / "instructors" / f"{contents.find(number, 'lessons', root).stem}.md"


def read(number: int, root: Path = ROOT) -> Note | None:
    """The note on a lesson; None where none is written. Raises ValueError for one that cannot be understood."""
    import yaml

    path = note_path(number, root)
    if not path.exists():
        return None
    opening, _, rest = path.read_text(encoding="utf-8").partition("\n")
    front, end, text = rest.partition("\n---")
    if opening.strip() != "---" or not end:
        raise ValueError(f"{path.name} must begin with its YAML between two lines of ---")
    try:
        given = yaml.safe_load(front) or {}
        note = Note(
            path,
            [Skip(plain(skip["section"]), str(skip.get("because", ""))) for skip in given.get("skip_first") or []],
            [plain(title) for title in given.get("lab_core") or []],
            text.lstrip("-").strip(),
        )
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: its YAML is not skip_first and lab_core: {error}") from error
    return note


def plain(heading: str) -> str:
    """A heading's text without its #."""
    return heading.lstrip("#").strip()


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the note on one lesson. Returns 1 where none is written yet, 2 for a lesson that does not exist."""
    parser = ArgumentParser(prog="beyond class notes", description="The instructor's note on a lesson.")
    parser.add_argument("lesson", type=int, help="1 to 8")
    parser.add_argument("--path", action="store_true", help="only where the file lies")
    options = parser.parse_args(argv)
    note = read(options.lesson)
    if note is None:
        print(f"No note on lesson {options.lesson} is written yet: {note_path(options.lesson)}", file=sys.stderr)
        return 1
    print(note.path if options.path else note.text)
    return 0
