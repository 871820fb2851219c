"""``beyond class slides 3``: a lesson as slides, its outputs and figures as they lie in the notebook.

Each deck is one HTML file that opens from the disk, without a network and without any other file. It is the course's
own page and not nbconvert's reveal.js one: that loads reveal.js, require.js, jQuery, MathJax and Mermaid from servers,
and a room in which sixteen people share one uplink is no place to find out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEYS = "→ or space: on · ← back · n: a window with the notes · f: full screen · print: one slide a sheet"


def make(lesson: Path, folder: Path, *, notes: Path | None = None) -> tuple[Path, int]:
    """Write the deck of the notebook `lesson` into `folder`; returns the file and its number of slides.

    Args:
        notes: the instructor's note (Markdown), of which the parts under a lesson's heading become speaker notes.

    Raises:
        ValueError: `lesson` is no notebook.
        OSError: `folder` cannot be written.
    """
    import nbformat

    from classroom.authoring.slide_cutting import cut
    from classroom.authoring.slide_page import page

    try:
        notebook = nbformat.reads(lesson.read_text(encoding="utf-8"), as_version=4)
        slides = cut(notebook)
    except (ValueError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise ValueError(
            f"{lesson} is no notebook that can be read ({error}); take it from the repository again."
        ) from None
    if not slides:
        raise ValueError(f"{lesson} is an empty notebook; take it from the repository again.")
    told = speaker_notes(notes.read_text(encoding="utf-8")) if notes and notes.is_file() else {}
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{lesson.stem}.html"
    target.write_text(page(slides[0].heading, slides, told), encoding="utf-8", newline="\n")
    return target, len(slides)


def speaker_notes(note: str) -> dict[str, str]:
    """An instructor's note by heading: what stands under each `### heading`; under "" what stands before the first `##`."""
    body = re.sub(r"\A---\n.*?\n---\n", "", note, flags=re.DOTALL)
    found: dict[str, list[str]] = {"": []}
    at: str | None = ""
    for line in body.splitlines():
        if heading := re.match(r"(#+) +(.+?)\s*$", line):
            at = heading[2] if len(heading[1]) == 3 else "" if len(heading[1]) == 1 else None
            found.setdefault(at or "", [])
        elif at is not None:
            found[at].append(line)
    return {name: text for name, lines in found.items() if (text := "\n".join(lines).strip())}


def chosen(which: str, root: Path = ROOT) -> list[Path]:
    """The notebooks of lesson "3", or of "all".

    Raises:
        ValueError: no such lesson.
    """
    lessons = [path for path in sorted((root / "lessons").glob("0[1-9]_*.ipynb"))]
    if not lessons:
        raise ValueError(f"There are no lessons in {root / 'lessons'}; run this in a checkout of the course.")
    if which == "all":
        return lessons
    found = [path for path in lessons if which.isdecimal() and int(path.name[:2]) == int(which)]
    if not found:
        raise ValueError(f"There is no lesson {which!r}; give a number from 1 to {len(lessons)}, or all.")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Make the slides; returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="beyond class slides", description="A lesson as slides: one HTML file, no network."
    )
    parser.add_argument("lesson", help="a lesson's number, or all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "slides", help="the folder to write into")
    given = parser.parse_args(argv)
    try:
        for lesson in chosen(given.lesson):
            note = ROOT / "site" / "instructors" / f"{lesson.stem}.md"
            target, count = make(lesson, given.out, notes=note)
            print(f"{target}: {count} slides", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"The slides cannot be written to {given.out}: {error.strerror or error}. Choose another --out.",
            file=sys.stderr,
        )
        return 2
    print(KEYS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
