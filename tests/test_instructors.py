"""What an instructor reads and shows: notes that name what is in the lessons, and slides that lose nothing of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest
import yaml
from refusals import assert_refused

from classroom.authoring import colab_cells, lesson_tables, slides
from course_lib.figures.stored_figures import pictures
from course_lib.memory import estimate
from course_lib.units import GIB

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "site" / "instructors"
LESSONS = sorted((ROOT / "lessons").glob("0[1-9]_*.ipynb"))


def prose(path: Path) -> str:
    """The Markdown cells of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def exercises(lesson: Path) -> dict[str, int]:
    """The minutes of a lab's exercises by heading."""
    rows = re.findall(
        r"^## (\d+\. .+?) *\n\*difficulty .*? (\d+) minutes\*", prose(ROOT / "labs" / lesson.name), re.MULTILINE
    )
    return {heading: int(minutes) for heading, minutes in rows}


def test_each_note_names_what_is_in_its_lesson_and_its_lab():
    assert {path.stem for path in FOLDER.glob("*.md")} == {"index", *(lesson.stem for lesson in LESSONS)}
    for lesson in LESSONS:
        note = (FOLDER / f"{lesson.stem}.md").read_text(encoding="utf-8")
        front = yaml.safe_load(note.split("---\n")[1])
        headings = set(re.findall(r"^#{2,3} +(.+?) *$", prose(lesson), re.MULTILINE))
        asked = re.findall(r"^### (.+?) *$", note, re.MULTILINE)
        skipped = [skip["section"] for skip in front["skip_first"] if skip["because"]]
        assert len(asked) >= 5 and skipped and front["lab_core"], lesson.stem
        unknown = {*asked, *skipped} - headings | set(front["lab_core"]) - set(exercises(lesson))
        assert not unknown, f"{lesson.stem}: {unknown}"
        in_the_lab = note.split("\n## In the lab\n")[1].split("\n## ")[0]
        numbers = re.findall(r"^- \*\*(\d+)\. ", in_the_lab, re.MULTILINE)
        assert numbers == [str(n) for n in range(1, len(exercises(lesson)) + 1)], lesson.stem


def test_sections_and_links_that_a_note_refers_to_exist():
    for path in FOLDER.glob("*.md"):
        note = path.read_text(encoding="utf-8")
        links = [link for link in re.findall(r"\]\(([^)\s]+)\)", note) if "://" not in link]
        assert not [link for link in links if not (path.parent / link.partition("#")[0]).exists()], path.stem
    for lesson in LESSONS:
        numbered = set(re.findall(r"^#{2,3} (\d+)\. ", prose(lesson), re.MULTILINE))
        note = (FOLDER / f"{lesson.stem}.md").read_text(encoding="utf-8")
        elsewhere = r"(?:lesson \d|[Ll]esson \d's),? sections? \d+|(?:al\.|PaLM|2023)[^()]{0,20}, section [\d.]+"
        referred = re.findall(r"[Ss]ections? ([\d, and]+)", re.sub(elsewhere, "", note))
        assert {n for part in referred for n in re.findall(r"\d+", part)} <= numbered, lesson.stem


def test_tables_of_lessons_follow_the_map(tmp_path):
    assert lesson_tables.update(write=False) == [], "write them again: make labs"
    (tmp_path / "lessons").mkdir()
    for name in ("labs", "solutions", "pyproject.toml", *(f"lessons/{path.name}" for path in ROOT.glob("lessons/*"))):
        (tmp_path / name).symlink_to(ROOT / name)
    course_map = tmp_path / "lessons" / "00_start_here.ipynb"
    text_of_map = course_map.read_text(encoding="utf-8")
    course_map.unlink()
    course_map.write_text(re.sub(r"\| \d+ minutes \|", "| 999 minutes |", text_of_map), encoding="utf-8")
    shutil.copytree(FOLDER, tmp_path / "site" / "instructors")
    shutil.copy(ROOT / "site" / "combinations.md", tmp_path / "site")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(re.sub(r", lab \d+ \|", ", lab 999 |", text), encoding="utf-8")
    index = tmp_path / "site" / "instructors" / "index.md"
    text_of_index = index.read_text(encoding="utf-8")
    index.write_text(re.sub(r"\d+ \(day 2\)", "999 (day 2)", text_of_index), encoding="utf-8")
    assert lesson_tables.update(tmp_path, write=True) == [
        "lessons/00_start_here.ipynb",
        "README.md",
        "site/instructors/index.md",
    ]
    assert course_map.read_text(encoding="utf-8") == text_of_map
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text
    assert index.read_text(encoding="utf-8") == text_of_index
    (tmp_path / "README.md").write_text("no table", encoding="utf-8")
    assert_refused([(lambda: lesson_tables.update(tmp_path, write=True), ValueError, "README.md")])


def test_the_readme_is_short_and_what_it_types_is_computed_elsewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) < 700
    assert f"git clone {colab_cells.repository()} " in readme
    assert f"**{estimate('llama-3.1-8b', seq_len=2048).device / GIB:.0f} GiB.**" in readme


def test_slides_lose_nothing_and_fetch_nothing_but_reveal_js(tmp_path, capsys):
    assert slides.main(["1", "--out", str(tmp_path)]) == 0
    assert "network" in capsys.readouterr().out
    notebook, note = nbformat.read(LESSONS[0], as_version=4), (FOLDER / f"{LESSONS[0].stem}.md").read_text()
    cells = list(slides.slide_cells(notebook, note.split("---\n", 2)[2].strip()))
    kept = [cell for cell in notebook.cells if "colab" not in cell.metadata.get("tags", ())]
    code = [cell for cell in kept if cell.cell_type == "code"]
    assert [cell.source for cell in cells if cell.cell_type == "code" and cell.source] == [cell.source for cell in code]
    assert [cell.outputs for cell in cells if cell.get("outputs")] == [cell.outputs for cell in code if cell.outputs]
    shown = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert [
        heading for heading in re.findall(r"^## .+$", prose(LESSONS[0]), re.MULTILINE) if heading not in shown
    ] == []
    page = (tmp_path / f"{LESSONS[0].stem}.html").read_text(encoding="utf-8")
    drawn = [data for cell in code for output in cell.outputs for data, _ in pictures(output)]
    assert drawn and all(data in page for data in drawn)
    fetched = re.findall(r"""(?:<script[^>]*|<link[^>]*|<img[^>]*) (?:src|href)=["'](?!data:)([^"']+)""", page)
    assert fetched and all("reveal.js" in address for address in fetched), fetched
    (tmp_path / slides.LOCAL).mkdir(parents=True)
    assert slides.main(["1", "--out", str(tmp_path)]) == 0
    assert "https://unpkg" not in (tmp_path / f"{LESSONS[0].stem}.html").read_text(encoding="utf-8")
    assert "network" not in capsys.readouterr().out
    assert slides.main(["9"]) == slides.main(["two"]) == 2


def test_a_question_waits_for_its_answer_and_notes_stand_with_their_heading():
    text = "# A lesson\n\nWords.\n\n## 3. What it costs\n\n**How many bytes?** Seven.\n\n```\n# no heading\n```"
    output = nbformat.v4.new_output("stream", text="7\n")
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell("print(7)", outputs=[output])]
    note = "# For you\n\nTell them.\n\n## Ask\n\n### 3. What it costs\n\nAsk twice.\n\n## Lab\n\nNot here."
    made = list(slides.slide_cells(nbformat.v4.new_notebook(cells=cells), note))
    assert [(cell.metadata.slideshow.slide_type, cell.source.strip().partition("\n")[0]) for cell in made] == [
        ("slide", "# A lesson"),
        ("notes", "Tell them."),
        ("slide", "## 3. What it costs"),
        ("notes", "Ask twice."),
        ("fragment", "Seven."),
        ("subslide", "print(7)"),
        ("fragment", ""),
    ]
    assert made[2].source.endswith("**How many bytes?**") and made[-1].outputs


@pytest.mark.parametrize("link", ["[lab](../labs/x.ipynb)", "[Open in Colab](https://colab.research.google.com/x)"])
def test_slides_have_no_link_that_leads_nowhere(link):
    assert "](" not in slides.for_slides(f"before {link} `$x$` after") and "`$x$`" in slides.for_slides(f"`$x$` {link}")
    assert "<math" in slides.for_slides("costs $x^2$")
