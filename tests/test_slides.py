"""A lesson as slides: nothing of it is lost, nothing is fetched, and every slide fits a projector."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from classroom.authoring import slides
from course_lib.figures.stored_figures import pictures

ROOT = Path(__file__).resolve().parent.parent
LESSON = ROOT / "lessons" / "01_gpu_memory.ipynb"


class Seen(HTMLParser):
    """What a browser would fetch, show and read out."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.fetched: list[str] = []
        self.alts: list[str] = []
        self.headings: list[str] = []
        self.words: list[str] = []
        self._heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in ("src", "srcset", "data", "poster", "action") + (("href",) if tag == "link" else ()):
            if given.get(name) and not str(given[name]).startswith("data:"):
                self.fetched.append(f"{tag} {name}={given[name]}")
        if tag == "img":
            self.alts.append(given.get("alt") or "")
        if self._heading or tag in ("h1", "h2", "h3"):
            self._heading = True
            self.headings += [""] if tag in ("h1", "h2", "h3") else []

    def handle_endtag(self, tag: str) -> None:
        self._heading = self._heading and tag not in ("h1", "h2", "h3")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._heading:
            self.headings[-1] += data


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.fixture(scope="module")
def deck(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    """Lesson 1's slides, with its note, and what is seen of them."""
    note = ROOT / "site" / "instructors" / LESSON.with_suffix(".md").name
    path, _ = slides.make(LESSON, tmp_path_factory.mktemp("slides"), notes=note)
    return path, Seen(path.read_text(encoding="utf-8"))


def test_nothing_is_lost(deck: tuple[Path, Seen]) -> None:
    _, seen = deck
    notebook = nbformat.read(LESSON, as_version=4)
    shown = squeezed("".join(seen.words))
    for cell in [cell for cell in notebook.cells if "colab" not in cell.metadata.get("tags", ())]:
        if cell.cell_type == "code":
            assert squeezed(cell.source) in shown, f"code is lost: {cell.source[:60]}"
        for line in re.findall(r"^#{1,3} +(.+?) *$", cell.source, re.MULTILINE) if cell.cell_type == "markdown" else ():
            assert line in seen.headings, f"no slide begins with {line!r}"
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                assert squeezed(output.text) in shown
            drawn = pictures(output)
            assert all(alt in seen.alts for _, alt in drawn)
            if not drawn and "text/html" in output.get("data", {}):
                assert squeezed("".join(Seen(output.data["text/html"]).words)) in shown
    for sentence in (
        "And the state did not exist before the first step()",
        "Dettmers et al., QLoRA (arXiv:2305.14314)",
    ):
        assert squeezed(sentence) in shown
    assert all(seen.alts), "a picture without words"


def test_nothing_is_fetched_and_no_link_leads_to_a_neighbour(deck: tuple[Path, Seen]) -> None:
    path, seen = deck
    text = path.read_text(encoding="utf-8")
    assert seen.fetched == []
    assert not re.search(r"url\((?!data:)|@import|<iframe|<script[^>]+src", text)
    assert [link for link in re.findall(r'<a [^>]*href="([^"]*)"', text) if not link.startswith("https://")] == []


def test_speaker_notes_stand_with_their_section_and_a_question_hides_what_follows(tmp_path: Path) -> None:
    cells = [
        nbformat.v4.new_markdown_cell(
            "# A lesson\n\nWords.\n\n## 3. What it costs\n\n**How many bytes?** Seven, of course.\n\nAfter."
        ),
        nbformat.v4.new_code_cell("x = 1\n" * 40),
        nbformat.v4.new_code_cell('print("<b>")', outputs=[nbformat.v4.new_output("stream", text="<b>&\n")]),
    ]
    notebook, note = tmp_path / "03_toy.ipynb", tmp_path / "03_toy.md"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
    note.write_text(
        "---\nminutes: 5\n---\n\n# For you\n\nTell them.\n\n## Ask\n\n### 3. What it costs\n\nAsk <i>twice</i>.\n\n## Lab\n\nNot here.\n"
    )
    path, count = slides.make(notebook, tmp_path, notes=note)
    first, *others = path.read_text().split("<section")[1:]
    assert count == len(others) + 1
    assert (
        "<aside><p>Tell them.</p>" in first.replace("\n", "")
        and "Ask" not in first
        and "Not here" not in path.read_text()
    )
    asked = next(section for section in others if "How many bytes?" in section)
    assert '<strong class="asks">How many bytes?</strong><span class="later"> Seven, of course.</span>' in asked
    assert "After." not in asked and all("Ask <i>twice</i>" in section for section in others)
    assert "&lt;b&gt;&amp;" in others[-1] and 'class="scrolls"' in "".join(others)


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for words in (["9"], ["two"], ["3", "--out", str(tmp_path / "file")]):
        assert slides.main(words) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and len(told) > 25, told
    (tmp_path / "03_x.ipynb").write_text(json.dumps({"cells": [1], "nbformat": 4}))
    with pytest.raises(ValueError, match="no notebook that can be read"):
        slides.make(tmp_path / "03_x.ipynb", tmp_path)


def test_every_slide_fits_and_the_keys_work(deck: tuple[Path, Seen]) -> None:
    browser_tools = pytest.importorskip("browser")
    path, _ = deck
    with browser_tools.chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        too_large = page.evaluate(
            """slides.map((slide, i) => {
              const body = slide.querySelector('.body').getBoundingClientRect(), foot = slide.closest('main').getBoundingClientRect();
              const inside = [...slide.querySelectorAll('.fit > *')].filter(one => one.getBoundingClientRect().height > 0)
                .every(one => { const box = one.getBoundingClientRect(); return box.bottom <= body.bottom + 1 && box.right <= foot.right; });
              return inside && !slide.querySelector('.body.long') ? 0 : i + 1;
            }).filter(Boolean)"""
        )
        assert too_large == []
        for number in (1, 3, 12, 15):
            page.evaluate(f"show({number - 1}, true)")
            browser_tools.shot(page, f"slides-lesson1-{number:02}")
        page.evaluate("show(0)")
        for key, place in (("ArrowRight", 2), ("End", None), ("Home", 1), ("PageDown", 2), ("ArrowLeft", 1)):
            page.keyboard.press(key)
            assert place is None or page.locator("#place").inner_text().startswith(f"{place} / ")
        asking = page.evaluate("slides.findIndex(slide => slide.querySelector('.later'))")
        page.evaluate(f"show({asking})")
        page.keyboard.press(" ")
        assert page.evaluate("at") == asking and page.evaluate("slides[at].querySelector('.waits')") is None
        with page.expect_popup() as opened:
            page.keyboard.press("n")
        page.keyboard.press("Home")
        assert "the worst moment" in opened.value.locator("body").inner_text()
        assert wrong == []
