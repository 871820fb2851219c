"""``beyond class slides 3``: a lesson as slides, its outputs and figures as they lie in the notebook.

Each deck is one HTML file that opens from the disk, without a network and without any other file. nbconvert's reveal.js
slides load reveal.js, require.js, jQuery, MathJax and Mermaid from servers, which a room that shares one uplink may not
reach.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from course_lib.files import write_atomically
from course_lib.notebook import contents
from course_lib.notebook.contents import ROOT
from course_tools.command_line import ArgumentParser, reports_errors

TEMPLATE = Path(__file__).with_name("slides.html.j2")
KEYS = "→ or space: on · ← back · n: a window with the notes · f: full screen · print: one slide per sheet"


def make(lesson: Path, folder: Path, *, notes: Path | None = None) -> tuple[Path, int]:
    """Write the deck of the notebook `lesson` into `folder`; returns the file and its number of slides.

    Args:
        notes: the instructor's note (Markdown), of which the parts under a lesson's heading become speaker notes.

    Raises:
        ValueError: `lesson` is no notebook.
        OSError: `folder` cannot be written.
    """
    import jinja2
    import nbformat
    from markupsafe import Markup

    from classroom.authoring.slide_blocks import inline, markdown
    from classroom.authoring.slide_cutting import cut

    try:
        slides = cut(nbformat.reads(lesson.read_text(encoding="utf-8"), as_version=4))
    except (ValueError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise ValueError(
            f"{lesson} is no notebook that can be read ({error}); take it from the repository again."
        ) from None
    if not slides:
        raise ValueError(f"{lesson} is an empty notebook; take it from the repository again.")
    by_heading = speaker_notes(notes.read_text(encoding="utf-8")) if notes and notes.is_file() else {}
    environment = jinja2.Environment(autoescape=True)
    environment.filters |= {
        "inline": lambda text: Markup(inline(text)),
        "markdown": lambda text: Markup(markdown(text)),
    }
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{lesson.stem}.html"
    write_atomically(target, template.render(title=slides[0].heading, slides=slides, notes=by_heading))
    return target, len(slides)


def speaker_notes(note: str) -> dict[str, str]:
    """Split a note by `### heading`; under "" stands what comes before its first `##`."""
    body = re.sub(r"\A---\n.*?\n---\n", "", note, flags=re.DOTALL)
    found: dict[str, list[str]] = {"": []}
    current: str | None = ""
    for line in body.splitlines():
        if heading := re.match(r"(#+) +(.+?)\s*$", line):
            current = heading[2] if len(heading[1]) == 3 else "" if len(heading[1]) == 1 else None
            found.setdefault(current or "", [])
        elif current is not None:
            found[current].append(line)
    return {name: text for name, lines in found.items() if (text := "\n".join(lines).strip())}


def chosen(which: str) -> list[Path]:
    """The notebooks of lesson "3", or of "all". Raises ValueError where there is no such lesson."""
    if which == "all":
        return [contents.find(row.number, "lessons") for row in contents.map_rows()]
    if not which.isdecimal():
        raise ValueError(f"There is no lesson {which!r}; give its number, or all.")
    return [contents.find(int(which), "lessons")]


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Make the slides; returns 0, or 2 for bad input."""
    parser = ArgumentParser(prog="beyond class slides", description="A lesson as slides: one HTML file, no network.")
    parser.add_argument("lesson", help="a lesson's number, or all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "slides", help="the folder to write into")
    options = parser.parse_args(argv)
    for lesson in chosen(options.lesson):
        note = ROOT / "site" / "instructors" / f"{lesson.stem}.md"
        target, count = make(lesson, options.out, notes=note)
        print(f"{target}: {count} slides", flush=True)
    print(KEYS)
    return 0
