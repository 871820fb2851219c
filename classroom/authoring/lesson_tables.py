"""The tables of README.md, of the map, of the instructors' index and of what combines with what.

They are written from lessons/course.toml, the notebooks, the notes and `course_lib.choices`.

Each stands between two comments, such as ``<!-- lessons -->`` and ``<!-- /lessons -->``. ``python -m
classroom.authoring.lesson_tables`` writes the files that changed; `--check` only names them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from classroom.authoring import colab_cells, combinations, in_step, plans
from course_lib.files import write_atomically
from course_lib.notebook import contents
from course_lib.notebook.contents import ROOT


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
        core = plans.core_minutes(row, root)
        rows.append(
            f"| {row.number} | [the note]({row.name}.md) | [{row.title}](../../lessons/{row.name}.ipynb) | {row.minutes} "
            f"| {core} | {row.lab_minutes - core} |"
        )
    return "\n".join(rows) + "\n"


def paths_table(root: Path = ROOT) -> str:
    """How long the whole course takes, and a row for each of the learners' paths."""
    rows = contents.map_rows(root)
    deeper = [contents.stated_minutes(path) for path in (root / "lessons" / "deeper").glob("*.ipynb")]
    lessons, core = sum(row.minutes for row in rows), sum(plans.core_minutes(row, root) for row in rows)
    labs = sum(row.lab_minutes for row in rows)
    lines = [
        f"The {len(rows)} lessons take about {hours(lessons)}, their labs {hours(labs)} (the core of each, two or three "
        f"exercises, {hours(core)}), and what goes deeper {hours(sum(deeper))}. Nobody needs all of it:",
        "",
        "| you have | take | about |",
        "| --- | --- | --- |",
        *(
            f"| **{title}** | {taken}. {words} | {hours(minutes)} |"
            for title, taken, words, minutes in plans.paths(root)
        ),
    ]
    return "\n".join(lines) + "\n"


def hours(minutes: int) -> str:
    """'55 minutes' or '7½ hours'."""
    whole, half = divmod(round(minutes / 30), 2)
    return f"{minutes} minutes" if minutes < 90 else f"{whole}{'½' * half} hours"


def track_table(track: plans.Track) -> str:
    """For whom it is, one row per lesson with its lab, and the minutes of each session."""
    rows: list[list] = [[track.session, "lesson", "minutes", "the lab", "minutes"], ["---"] * 5]
    for number, parts in enumerate(track.sessions, 1):
        for part in parts:
            if part.kind == "lesson":
                rows.append([number, part.title, part.minutes, "", ""])
            elif part.kind == "lab":
                rows[-1][3:] = [part.title, part.minutes]
    table = "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
    totals = [f"{sum(part.minutes for part in s)} ({track.session} {n})" for n, s in enumerate(track.sessions, 1)]
    return f"{track.who}\n\n{table}\n\nMinutes with breaks: {', '.join(totals)}.\n"


def update(root: Path = ROOT, *, write: bool) -> list[str]:
    """Name the files whose tables are out of step; with `write`, write them."""
    index = {name: track_table(track) for name, track in plans.tracks(root).items()}
    tables = {
        "lessons/00_start_here.ipynb": {"paths": paths_table(root)},
        "README.md": {"lessons": readme_table(root)},
        "site/combinations.md": {"combinations": combinations.page() + "\n"},
        "site/instructors/index.md": {"lessons": instructors_table(root), **index},
    }
    changed = []
    for file, by_name in tables.items():
        text = wanted = (root / file).read_text(encoding="utf-8")
        for name, table in by_name.items():
            begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
            if file.endswith(".ipynb"):
                begin, end, table = map(_as_in_a_notebook, (begin, end, table))
            if (text.count(begin), text.count(end)) != (1, 1):
                raise ValueError(f"{file} needs one pair of <!-- {name} --> and <!-- /{name} --> around its table")
            wanted = wanted.split(begin)[0] + begin + table + end + wanted.split(end)[1]
        if wanted != text:
            changed.append(file)
            if write:
                write_atomically(root / file, wanted)
    return changed


def _as_in_a_notebook(text: str) -> str:
    """Lines of a Markdown cell as nbformat writes them."""
    return "".join(f"    {json.dumps(line, ensure_ascii=False)},\n" for line in text.splitlines(keepends=True))


if __name__ == "__main__":
    sys.exit(in_step.run(update, __doc__, sys.argv[1:]))
