"""The tables of lessons in README.md and in the instructors' index, written from lessons/course.toml, the notebooks and the notes.

A table stands between two comments, ``<!-- lessons -->`` and ``<!-- /lessons -->``. ``python -m
classroom.authoring.lesson_tables`` writes the files that changed; `--check` only names them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from classroom.authoring import colab_cells, notes
from course_lib.files import write_atomically
from course_lib.notebook import contents
from course_lib.notebook.contents import ROOT

BEGIN, END = "<!-- lessons -->\n", "<!-- /lessons -->\n"


def readme_table(root: Path = ROOT) -> str:
    """One row per lesson: title, question, minutes of lesson and lab, what it needs."""
    address = colab_cells.repository(root)
    rows = ["| | lesson | the question | minutes | needs |", "| --- | --- | --- | --- | --- |"]
    for row in contents.map_rows(root):
        links = f"[{row.title}](lessons/{row.name}.ipynb), [lab](labs/{row.name}.ipynb)"
        if row.name in colab_cells.NAMES:
            links += f", [Colab]({colab_cells.address_in_colab(address, f'lessons/{row.name}.ipynb')})"
        rows.append(f"| {row.number} | {links} | {row.question} | {row.minutes}, lab {row.lab_minutes} | {row.needs} |")
    return "\n".join(rows) + "\n"


def instructors_table(root: Path = ROOT) -> str:
    """One row per lesson: its note, its minutes, and those of the lab's core and of the rest."""
    rows = [
        "| | note | lesson | minutes | the lab's core | the rest of the lab |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in contents.map_rows(root):
        note = notes.read(row.number, root)
        core = sum(exercise.minutes for exercise in row.exercises if note and exercise.title in note.lab_core)
        rows.append(
            f"| {row.number} | [the note]({row.name}.md) | [{row.title}](../../lessons/{row.name}.ipynb) | {row.minutes} "
            f"| {core} | {row.lab_minutes - core} |"
        )
    return "\n".join(rows) + "\n"


TABLES = {"README.md": readme_table, "site/instructors/index.md": instructors_table}


def update(root: Path = ROOT, *, write: bool) -> list[str]:
    """Name the files whose table is out of step; with `write`, write them."""
    changed = []
    for name, table in TABLES.items():
        text = (root / name).read_text(encoding="utf-8")
        if (text.count(BEGIN), text.count(END)) != (1, 1):
            raise ValueError(f"{name} needs one pair of <!-- lessons --> and <!-- /lessons --> around its table")
        before, rest = text.split(BEGIN)
        wanted = before + BEGIN + table(root) + END + rest.split(END)[1]
        if wanted != text:
            changed.append(name)
            if write:
                write_atomically(root / name, wanted)
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables; with --check, return 1 where one is not in step."""
    parser = argparse.ArgumentParser(prog="python -m classroom.authoring.lesson_tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; name the files that are not in step")
    check = parser.parse_args(argv).check
    try:
        changed = update(write=not check)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for name in changed:
        print(
            f"{name}: {'its table of lessons is not in step with lessons/course.toml and the notebooks' if check else 'written'}"
        )
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
