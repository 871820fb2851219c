"""The course as a site: built without warnings and without network, nothing of a lesson lost, no link broken."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from classroom.authoring import combinations
from course_lib.figures.stored_figures import pictures

pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install -e .[site]")
ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("0[1-9]_*.ipynb"))
NO_NETWORK = """
import socket

def refuse(*arguments, **options):
    raise OSError("the site's build asked for the network")

socket.getaddrinfo = socket.create_connection = refuse
"""


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of site/, which is a folder of scripts and no package."""
    monkeypatch.syspath_prepend(str(ROOT / "site"))
    spec = importlib.util.spec_from_file_location(f"course_site_{name}", ROOT / "site" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning or a broken link would end the build, or print more than its one line."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    command = [sys.executable, ROOT / "site" / "build.py", folder / "site"]
    built = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": str(folder)}
    )
    assert built.returncode == 0 and not built.stderr, built.stdout + built.stderr
    assert built.stdout.count("\n") == 1 and " 0 broken links" in built.stdout
    return folder / "site"


def alternative_texts(lesson: str) -> list[str]:
    """What the pictures of a lesson say of themselves, in order: drawings in its text, figures in its outputs."""
    texts = []
    for cell in json.loads((ROOT / "lessons" / f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            texts += re.findall(r"^!\[(.*)\]", "".join(cell["source"]), re.MULTILINE)
        texts += [alt for output in cell.get("outputs", ()) for _, alt in pictures(output)]
    return texts


def test_no_lesson_lacks_a_figure_a_formula_its_lab_or_its_card(site):
    cards = re.findall(r"<li style=.*?</li>", (site / "index.html").read_text(encoding="utf-8"))
    assert len(cards) == len(LESSONS)
    for lesson, card in zip(LESSONS, cards, strict=True):
        page = (site / "lessons" / f"{lesson}.html").read_text(encoding="utf-8")
        images = re.findall(r"""<img [^>]*?alt=(?:"([^"]*)"|'([^']*)')""", page.partition("<article")[2])
        assert [html.unescape(a or b) for a, b in images] == alternative_texts(lesson), lesson
        assert re.findall(r"<h(\d)", page).count("1") == 1 and f'href="../labs/{lesson}.html"' in page, lesson
        leftovers = [word for word in ("Traceback", "widget-view", "colab_setup", r"\frac") if word in page]
        assert not leftovers, lesson
        assert f"lessons/{lesson}.html" in card and f"labs/{lesson}.html" in card and " minutes" in card, lesson


def test_what_goes_deeper_is_on_the_map_and_follows_its_lesson(site):
    course_map = (ROOT / "lessons" / "00_start_here.ipynb").read_text(encoding="utf-8")
    for name in [path.stem for path in (ROOT / "lessons" / "deeper").glob("*.ipynb")]:
        lesson = next((lesson for lesson in LESSONS if lesson[:3] == name[:3]), "00_start_here")  # claims are of all
        page = (site / "lessons" / f"{lesson}.html").read_text(encoding="utf-8")
        assert f"](deeper/{name}.ipynb)" in course_map and f'href="deeper/{name}.html"' in page, name
        assert (site / "lessons" / "deeper" / f"{name}.html").exists(), name


def test_labs_ask_and_solutions_answer_but_are_not_searched(site):
    lab = (site / "labs" / f"{LESSONS[0]}.html").read_text(encoding="utf-8")
    solution = (site / "solutions" / f"{LESSONS[0]}.html").read_text(encoding="utf-8")
    assert "cell_output" not in lab and "passed" in solution and "BEGIN SOLUTION" not in solution
    index = json.loads((site / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(")[:-1])
    solved = {number for number, name in enumerate(index["docnames"]) if name.startswith("solutions/0")}
    places = [found if isinstance(found, list) else [found] for found in index["terms"].values()]
    assert len(solved) == len(LESSONS) and not solved & {page for pages in places for page in pages}


def test_the_page_of_combinations_has_every_mark(site):
    page = (site / "combinations.html").read_text(encoding="utf-8")
    marks = [combinations.mark(choices)[0] for choices in combinations.cells()]
    assert re.findall(r"<td><p>(runs|model|no)\b", page)[: len(marks)] == marks
    assert all(f">{name}</span>" in page for name in combinations.SCHEDULES)


def test_broken_links_and_what_a_page_would_fetch_are_found(tmp_path, monkeypatch):
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="https://example.org/x"></a><a href="#nowhere"></a><a href="c.html"></a>'
        '<a href="b.html#gone"></a><img src="https://cdn.example.org/x.png"><style>@import "//fonts.example.org/f"</style>'
    )
    problems, outside = module("check_links", monkeypatch).check(tmp_path)
    assert outside == {"https://example.org/x"}
    culprits = ["#nowhere", "c.html", "b.html#gone", "cdn.example.org", "fonts.example.org"]
    assert len(problems) == len(culprits) and all(map(str.__contains__, problems, culprits)), problems


def test_a_folder_that_is_no_site_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "thesis.txt").write_text("the only copy")
    assert module("build", monkeypatch).main([str(tmp_path)]) == 2
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"
