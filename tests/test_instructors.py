"""The instructor's notes name what is in the lessons: headings, minutes, exercises, links. Reads files only."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from classroom.authoring import lesson_tables

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "site" / "instructors"
LESSONS = sorted((ROOT / "lessons").glob("0[1-9]_*.ipynb"))
NAMES = [path.stem for path in LESSONS]
TAGS = {"skip_first", "lab_core"}
SLACK = 5  # minutes by which a plan's short lesson may be off what `pace` says


def cells(path: Path) -> list[str]:
    """The sources of a notebook's Markdown cells."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


def headings(path: Path) -> list[str]:
    """The `##` and `###` headings of a notebook."""
    return re.findall(r"^#{2,3} +(.+?) *$", "\n".join(cells(path)), re.MULTILINE)


def exercises(name: str) -> dict[str, int]:
    """The minutes of a lab's exercises by heading."""
    text = "\n".join(cells(ROOT / "labs" / f"{name}.ipynb"))
    found = re.findall(r"^## (\d+\. .+?) *\n\*difficulty .*? (\d+) minutes\*", text, re.MULTILINE)
    return {heading: int(minutes) for heading, minutes in found}


def front(name: str) -> dict[str, Any]:
    """A note's YAML."""
    return yaml.safe_load((FOLDER / f"{name}.md").read_text(encoding="utf-8").split("---\n")[1])


def test_each_lesson_has_a_note_and_no_note_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {"index", *NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_note_names_what_is_in_its_lesson(name: str) -> None:
    given, lesson = front(name), headings(ROOT / "lessons" / f"{name}.ipynb")
    assert set(given) == TAGS
    skipped = [skip["section"] for skip in given["skip_first"]]
    assert skipped and all(set(skip) == {"section", "because"} and skip["because"] for skip in given["skip_first"])
    assert [section for section in skipped if section not in lesson] == []
    assert given["lab_core"] and [title for title in given["lab_core"] if title not in exercises(name)] == []
    asked = re.findall(r"^### (.+?) *$", (FOLDER / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(asked) >= 5 and [heading for heading in asked if heading not in lesson] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_note_knows_every_exercise_by_its_number(name: str) -> None:
    lab = (FOLDER / f"{name}.md").read_text(encoding="utf-8").split("\n## In the lab\n")[1].split("\n## ")[0]
    numbers = re.findall(r"^- \*\*(\d+)\. ", lab, re.MULTILINE)
    assert numbers == [str(n) for n in range(1, len(exercises(name)) + 1)]


def plans() -> list[tuple[str, int, str, int]]:
    """(lesson's number, its minutes, exercise's heading, its minutes) of the one-day and the two-day plan."""
    text = (FOLDER / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(?: \d \|)? (\d) \| (\d+) \| exercise (\d), (.+?) \| (\d+) \|", text, re.MULTILINE)
    return [(lesson, int(short), f"{number}. {title}", int(minutes)) for lesson, short, number, title, minutes in rows]


def test_the_tables_of_lessons_are_those_of_the_map() -> None:
    assert lesson_tables.update(write=False) == [], "write them again: make labs"


def test_a_table_that_is_out_of_step_is_written(tmp_path) -> None:
    for name in ("lessons", "labs", "solutions"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(FOLDER, tmp_path / "site" / "instructors")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(re.sub(r", lab \d+ \|", ", lab 999 |", text), encoding="utf-8")
    assert lesson_tables.update(tmp_path, write=False) == ["README.md"]
    assert lesson_tables.update(tmp_path, write=True) == ["README.md"]
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text
    (tmp_path / "README.md").write_text("no table", encoding="utf-8")
    with pytest.raises(ValueError, match="README.md needs one pair"):
        lesson_tables.update(tmp_path, write=True)


def test_the_plans_minutes_are_the_lessons_and_the_labs() -> None:
    text = (FOLDER / "index.md").read_text(encoding="utf-8")
    for lesson, _, heading, minutes in plans():
        assert exercises(NAMES[int(lesson) - 1]).get(heading) == minutes, heading
    day, *two = [plans()[:4], plans()[4:8], plans()[8:]]
    total = [sum(short + minutes for _, short, _, minutes in one) for one in (day, *two)]
    assert f"That is {total[0]} minutes" in text and f"{total[1]} minutes, then {total[2]}" in text


def test_the_short_lessons_of_the_plans_are_within_reach_by_what_the_notes_skip() -> None:
    pace = pytest.importorskip("classroom.workshop.pace")
    for lesson, short in {(lesson, short) for lesson, short, *_ in plans()}:
        lines, _ = pace.lesson(int(lesson), short, None)
        needed = next(int(line.split()[0]) for line in lines if re.match(r"\d+ minutes", line))
        assert needed <= short + SLACK, f"lesson {lesson} takes {needed} minutes with everything skipped, not {short}"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_links_lead_somewhere_and_no_machine_is_named(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (path.parent / target.partition("#")[0]).exists()] == []
    assert not re.search(r"(?<![\w.])/(?:work|home|root|Users|tmp)/", text)


def test_sections_that_a_note_refers_to_exist() -> None:
    for name in NAMES:
        numbered = {
            int(found[1])
            for heading in headings(ROOT / "lessons" / f"{name}.ipynb")
            if (found := re.match(r"(\d+)\. ", heading))
        }
        text = re.sub(
            r"(?:lesson \d|[Ll]esson \d's),? sections? \d+", "", (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        )
        text = re.sub(r"(?:al\.|PaLM|2023)[^()]{0,20}, section [\d.]+", "", text)  # of a paper
        asked = {int(n) for part in re.findall(r"[Ss]ections? ([\d, and]+)", text) for n in re.findall(r"\d+", part)}
        assert asked <= numbered, f"{name}: {sorted(asked - numbered)}"
