"""The course as a site: built without warnings and without network, and read in a browser, on a phone and at a desk."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from browser import chromium, shot

from course_lib.figures.stored_figures import pictures

pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install -e .[site]")
ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("0[1-9]_*.ipynb"))
WINDOWS = {"phone": (390, 844), "desk": (1440, 900)}
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
    """The built site; what was printed on the way must be one line."""
    out = tmp_path_factory.mktemp("pages") / "site"
    quiet = tmp_path_factory.mktemp("no-network")
    (quiet / "sitecustomize.py").write_text(NO_NETWORK)
    built = subprocess.run(
        [sys.executable, ROOT / "site" / "build.py", out],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": str(quiet)},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert not built.stderr and re.fullmatch(r"site: \d+ pages, .* 0 broken links, .*\n", built.stdout), built
    return out


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The site on a port of this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as opened:
        yield opened


def alts(lesson: str) -> list[str]:
    """What the figures of a lesson say of themselves, in order."""
    cells = json.loads((ROOT / "lessons" / f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    html = [("".join(output.get("data", {}).get("text/html", "")), output) for output in outputs]
    return [alt for text, output in html if text.startswith("<img") for _, alt in pictures(output)]  # not within more


def test_every_lesson_has_its_figures_described_and_its_formulas_drawn(site):
    import html

    for lesson in LESSONS:
        page = (site / "lessons" / f"{lesson}.html").read_text(encoding="utf-8")
        images = [" ".join(html.unescape(alt).split()) for alt in re.findall(r'<img alt="([^"]*)"[^>]*_images/', page)]
        assert len(images) >= 3 and images == [" ".join(alt.split()) for alt in alts(lesson)], lesson
        assert re.findall(r"<h(\d)", page).count("1") == 1, lesson
        assert f'href="../labs/{lesson}.html"' in page
        assert "Traceback" not in page and "widget-view" not in page and "colab_setup" not in page
    ddp = (site / "lessons" / "04_ddp_accelerate.html").read_text(encoding="utf-8")
    assert "<mfrac>" in ddp and r"\frac" not in ddp


def test_labs_ask_and_solutions_answer_but_are_not_searched(site):
    lab = (site / "labs" / f"{LESSONS[0]}.html").read_text(encoding="utf-8")
    solution = (site / "solutions" / f"{LESSONS[0]}.html").read_text(encoding="utf-8")
    assert "cell_output" not in lab and "Hint" in lab
    assert "passed" in solution and "BEGIN SOLUTION" not in solution
    index = json.loads((site / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(")[:-1])
    assert set(map("lessons/{}".format, LESSONS)) <= set(index["docnames"])
    solved = {number for number, name in enumerate(index["docnames"]) if name.startswith("solutions/0")}
    found = [places if isinstance(places, list) else [places] for places in index["terms"].values()]
    assert len(solved) == len(LESSONS) and not solved & {page for pages in found for page in pages}


def test_each_lesson_is_a_card_with_its_question_minutes_and_lab(site):
    cards = re.findall(r'<li><a class="lesson".*?</li>', (site / "index.html").read_text(encoding="utf-8"))
    assert [re.search(r"lessons/(\w+)\.html", card)[1] for card in cards] == LESSONS
    assert all(re.search(r'class="question">[^<]+\?<', card) and " minutes" in card for card in cards)
    assert all(f"labs/{lesson}.html" in card for lesson, card in zip(LESSONS, cards, strict=True))


def test_a_broken_link_and_a_picture_from_elsewhere_are_told(tmp_path, monkeypatch):
    check = module("check_links", monkeypatch).check
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="https://example.org/x"></a><a href="#nowhere"></a><a href="c.html"></a>'
        '<a href="b.html#gone"></a><img src="https://cdn.example.org/x.png"><style>@import "//fonts.example.org/f"</style>'
    )
    problems, outside = check(tmp_path)
    assert outside == {"https://example.org/x"}
    assert problems == [
        "a.html: #nowhere is no place on that page",
        "a.html: c.html is no file of the site",
        "a.html: b.html#gone is no place on that page",
        "a.html: <img> is fetched from cdn.example.org; keep it in the site",
        "a.html: <style> is fetched from fonts.example.org; keep it in the site",
    ]


def test_links_lead_to_pages_or_to_the_repository(monkeypatch):
    links = module("links", monkeypatch).Links(module("gather", monkeypatch).pages(), "https://example.org/r", ROOT)
    here = "lessons/01_gpu_memory.ipynb"
    for link, expected in {
        "../labs/01_gpu_memory.ipynb": "../labs/01_gpu_memory.ipynb",
        "02_single_gpu.ipynb#Where-you-stand!": "02_single_gpu.ipynb#where-you-stand",
        "../README.md": "https://example.org/r/blob/main/README.md",
        "../course_lib": "https://example.org/r/tree/main/course_lib",
        "nowhere.md": "nowhere.md",
        "https://example.org/x.ipynb": "https://example.org/x.ipynb",
    }.items():
        assert links.rewrite(f"[a]({link})", here) == f"[a]({expected})"
    assert links.rewrite('<a href="../labs/01_gpu_memory.ipynb">', here) == '<a href="../labs/01_gpu_memory.html">'
    assert links.rewrite("```\n[a](../README.md)\n```", here) == "```\n[a](../README.md)\n```"
    assert links.rewrite("[a](lessons/01_gpu_memory.ipynb)", "README.md", "README.md").endswith(f"({here})")


def test_a_notebook_loses_its_setup_cell_its_badge_and_its_warnings(monkeypatch):
    links = module("links", monkeypatch).Links({}, "https://example.org/r", ROOT)
    badge = "[![Open in Colab](https://colab.example.org/badge.svg)](https://colab.example.org/x)"
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": f"# Lesson\n{badge}"},
        {"cell_type": "code", "metadata": {"tags": ["colab"]}, "source": "set_up()", "outputs": []},
    ]
    page = module("notebook_page", monkeypatch).page_of({"cells": cells, "metadata": {}}, "lessons/09_x.ipynb", links)
    assert page["cells"][0]["source"] == "# Lesson\n[Open in Colab](https://colab.example.org/x)"
    assert "set_up()" not in str(page) and "`lessons/09_x.ipynb`" in page["cells"][1]["source"]


def test_a_folder_that_is_no_site_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.txt").write_text("the only copy")
    assert module("build", monkeypatch).main([str(tmp_path)]) == 2
    assert "is no site" in capsys.readouterr().err and (tmp_path / "thesis.txt").exists()


# What a reader would stumble over, as a list of sentences.
STUMBLES = """() => {
  const found = [];
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`the page is ${wide} px wide in a window of ${innerWidth}`);
  for (const image of document.images)
    if (image.src && !image.naturalWidth) found.push(`no image: ${image.src.slice(-60)}`);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const box = text.parentElement;
    if (!text.data.trim() || box.closest("script, style, title, math, .headerlink") || !box.getClientRects().length) continue;
    const size = parseFloat(getComputedStyle(box).fontSize);
    if (size < 14) found.push(`${size} px: ${text.data.trim().slice(0, 40)}`);
  }
  const rows = document.querySelectorAll(".sidebar-tree a.reference, .mobile-header label, .ways a, article summary");
  for (const row of rows) {
    const { width, height } = row.getBoundingClientRect();
    if (height && (height < 32 || width < 32)) found.push(`a finger misses ${row.textContent.trim().slice(0, 40) || row.className}: ${width} x ${height}`);
  }
  return found;
}"""


@pytest.mark.parametrize("window", WINDOWS)
def test_it_reads_on_a_phone_and_at_a_desk(browser, address, window):
    width, height = WINDOWS[window]
    context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
    page, noise = context.new_page(), []
    page.on("console", lambda said: said.type in ("error", "warning") and noise.append(said.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith((address, "data:")) or noise.append(asked.url))
    for path in ("index", "install", *(f"lessons/{lesson}" for lesson in LESSONS), "labs/02_single_gpu"):
        page.goto(f"{address}/{path}.html", wait_until="load")
        # A picture that is loaded when it comes into view is asked for now.
        page.evaluate(
            "() => Promise.all([...document.images].map(i => { i.loading = 'eager'; return i.decode().catch(() => 0) }))"
        )
        assert page.evaluate(STUMBLES) == [], path
        if path in ("index", "lessons/01_gpu_memory"):
            shot(page, f"site-{window}-{path.split('/')[-1]}")
    assert noise == []
    if window == "phone":
        page.locator(".mobile-header label[for=__navigation]:visible").click()
        page.locator(".sidebar-tree").get_by_role("link", name="Lesson 3: how ranks talk").click()
        assert page.url.endswith("03_collectives.html")
    context.close()


def test_the_search_finds_a_word(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/index.html")
    page.get_by_placeholder("Search").fill("ring all-reduce")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Lesson 3: how ranks talk").last.wait_for()
    results = page.locator("ul.search li > a").all_inner_texts()
    assert "Lesson 3: how ranks talk" in results and not [title for title in results if title.startswith("Solution")]
    shot(page, "site-search")
    page.close()


# Colours are what axe looks at longest: a page of each kind, with most kinds of element, on white and on black.
@pytest.mark.parametrize(
    ("scheme", "paths"),
    [
        ("light", ["index", "lessons/01_gpu_memory"]),
        ("dark", ["index", "labs/02_single_gpu"]),
    ],
)
def test_axe_finds_nothing_serious(browser, address, scheme, paths):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = browser.new_page(color_scheme=scheme, reduced_motion="reduce")
    for path in paths:
        page.goto(f"{address}/{path}.html", wait_until="load")
        found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
        serious = [violation for violation in found if violation["impact"] in ("serious", "critical")]
        told = [(v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"]) for v in serious]
        assert told == [], path
    shot(page, f"site-{scheme}")
    page.close()
