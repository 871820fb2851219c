"""The course in JupyterLab, as a person uses it: by mouse and keyboard, in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from pages import ROOT, chromium, executable, shot

from course_lib.models.smollm2_weights import cache_dir
from course_lib.notebook import progress

pytestmark = pytest.mark.timeout(900)
MAP = "lessons/00_start_here.ipynb"
LESSON, LAB, SOLUTION = (f"{room}/01_gpu_memory.ipynb" for room in ("lessons", "labs", "solutions"))
PATIENCE = 120.0  # seconds for anything: an idle machine needs a tenth of it
# What a lesson puts on the page, without its measurements: the lesson's own cells run in a kernel as tests of their own.
LESSON_CELLS = [
    "from course_lib import figures\n"
    "from course_lib.memory import CARDS, estimate\n"
    "from course_lib.notebook import ask, measured, takes\n"
    "from course_lib.notebook.widgets.memory import calculator\n"
    "need = estimate('llama-3.1-8b')",
    "peak = ask('Peak of a step', unit='GiB')",
    "takes(seconds=5)\nmeasured(peak, need.peak, formula=16 * 8e9)",
    "figures.against_cards({'8B': need}, cards={'t4': CARDS['t4'].memory}, title='Will it fit?')",
    "calculator()",
]
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A home and a copy of the notebooks; its path is short, for sockets lie below it."""
    made = Path(tempfile.mkdtemp(prefix="b1g-lab-"))
    for name in (MAP, LAB):
        (made / name).parent.mkdir()
        shutil.copy(ROOT / name, made / name)
    shutil.copytree(ROOT / "lessons" / "pictures", made / "lessons" / "pictures")
    cells = [nbformat.v4.new_code_cell(cell) for cell in LESSON_CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), made / LESSON)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def address(folder) -> Iterator[str]:
    """Where the map opens on `make lab`'s JupyterLab; it keeps its token and takes a free port."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    executable()  # no server where there is no browser to look at it
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "JPY_", "PYTEST"))}
    for variable in (
        "BEYOND_ONE_GPU_HOME",
        "IPYTHONDIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
    ):
        environment[variable] = str(folder / "home" / variable)
    # SmolLM2's weights are converted once for all tests.
    environment |= {"HOME": str(folder), "PYTHONPATH": str(ROOT), "BEYOND_ONE_GPU_CACHE": str(cache_dir())}
    overrides = folder / "home" / "JUPYTER_CONFIG_DIR" / "labconfig" / "default_setting_overrides.json"
    overrides.parent.mkdir(parents=True)
    overrides.write_text(json.dumps({"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}))
    command = [sys.executable, "-m", "course_lib.notebook.start_jupyterlab", "--no-browser", "--allow-root"]
    command += ["--MappingKernelManager.cull_idle_timeout=5", "--MappingKernelManager.cull_interval=1"]
    command += ["--ServerApp.root_dir=.", "--ServerApp.port=0", f"--LabApp.default_url=/lab/tree/{MAP}"]
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    shown = re.compile(r"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+")
    try:
        wait_until(lambda: server.poll() is not None or shown.search(log.read_text(errors="replace")))
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        yield shown.search(log.read_text(errors="replace"))[0]
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


class Lab:
    """The page: what a person does in JupyterLab by mouse and keyboard, and what they can read there."""

    def __init__(self, page, folder: Path):
        self.page, self.folder = page, folder
        page.set_default_timeout(1000 * PATIENCE)

    @property
    def notebook(self):
        """The notebook in front."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    def tab(self, file: str, also: str = ""):
        """A lesson and its lab have the same name on their tabs, and only the tooltip has the path."""
        return self.page.locator(f'.lm-DockPanel-tabBar .lm-TabBar-tab{also}[title*="Path: {file}"]')

    def ready(self, file: str) -> None:
        """Wait until `file` is in front, all of its cells are there and its kernel is idle."""
        cells = len(json.loads((self.folder / file).read_text())["cells"])
        self.tab(file, ".lm-mod-current").wait_for()
        self.notebook.locator(f".jp-Notebook .jp-Cell >> nth={cells - 1}").wait_for(state="attached")
        self.notebook.locator(".jp-Spinner").wait_for(state="detached")
        self.notebook.locator(".jp-KernelName", has_text="Python 3").wait_for()
        self.idle()

    def idle(self) -> None:
        """Wait until no cell is queued or running and the kernel says that it is idle."""
        self.notebook.locator(".jp-InputPrompt", has_text="[*]").first.wait_for(state="detached")
        self.notebook.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()

    def cell(self, source: str):
        """The code cell whose source has `source` in it."""
        editor = self.page.locator(".jp-InputArea-editor", has_text=source)
        return self.notebook.locator(".jp-CodeCell", has=editor).first

    def run(self, cell, code: str | None = None) -> str:
        """Shift+Enter in a cell, with `code` pasted over what stands there; returns what it shows when it is done."""
        prompt = cell.locator(".jp-InputPrompt")
        before = prompt.text_content()
        cell.locator(".cm-content").click()
        if code is not None:
            self.page.keyboard.press("Control+a")
            self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Shift+Enter")
        wait_until(lambda: prompt.text_content() != before)
        self.idle()
        return "\n".join(cell.locator(".jp-OutputArea-output").all_text_contents())


@pytest.fixture(scope="module")
def lab(address, folder) -> Iterator[Lab]:
    with chromium() as browser:
        lab = Lab(browser.new_page(viewport={"width": 1400, "height": 900}), folder)
        lab.page.goto(address)
        lab.ready(MAP)
        yield lab


@pytest.fixture(autouse=True)
def picture_at_the_end(lab, request) -> Iterator[None]:
    """What the page showed when the test was over, or failed."""
    yield
    shot(lab.page, request.node.name)


def guess_by_keyboard(lab, folder):
    """ "Run all" went past the box; a guess typed now, in the box that stands where the answer waits, unfolds it."""
    file = folder / "home" / "BEYOND_ONE_GPU_HOME" / "progress.json"
    answer = lab.notebook.get_by_text("GiB measured")
    assert not answer.count() and not progress.read(file).guesses
    above, box = (lab.notebook.get_by_label("Peak of a step").nth(number) for number in (0, 1))
    box.focus()
    for text, said in (("two", "not a number"), ("2,4", "point"), ("-1 GiB", "negative"), ("3 s", "not a unit here")):
        lab.page.keyboard.press("ControlOrMeta+A")
        lab.page.keyboard.type(text)
        lab.page.keyboard.press("Enter")
        lab.notebook.get_by_text(said).nth(1).wait_for()
        assert not answer.count() and above.input_value() == text
    shot(lab.page, "guess_refused")
    lab.page.keyboard.press("ControlOrMeta+A")
    lab.page.keyboard.type("100 GiB")
    lab.page.keyboard.press("Enter")
    answer.first.wait_for()
    shot(lab.page, "guess_measured")
    [record] = progress.read(file).guesses["01_gpu_memory"].values()
    assert record.guess == 100 and record.measured


def test_the_map_leads_to_a_lesson_whose_figures_and_slider_work(lab, folder):
    pictures = lab.notebook.locator("img").evaluate_all("all => all.map(i => [i.naturalWidth, i.alt])")
    assert len(pictures) == 9 and all(width and alt for width, alt in pictures), "the ring, and one on each card"
    button = lab.notebook.get_by_text("Begin with lesson 1")
    box = button.bounding_box()
    assert box["y"] + box["height"] < 900, "the button to go on stands on the first screen"
    button.click()
    lab.ready(LESSON)
    lab.page.locator("#jp-MainMenu .lm-MenuBar-item", has_text="Run").click()
    lab.page.locator(".lm-Menu-item", has=lab.page.get_by_text("Run All Cells", exact=True)).click()
    lab.notebook.locator(".jp-InputPrompt", has_text="[*]").first.wait_for(state="attached")
    lab.idle()
    assert not lab.notebook.locator("[data-mime-type='application/vnd.jupyter.error']").count()
    guess_by_keyboard(lab, folder)
    seen = lab.notebook.locator(".jp-OutputArea img").evaluate_all("all => all.map(i => [i.naturalWidth, i.alt])")
    assert len(seen) == 3 and all(width > 400 and alt for width, alt in seen), seen
    calculator = lab.notebook.locator(".jp-OutputArea-output", has=lab.page.locator(".widget-slider")).last
    picture = calculator.locator("img")
    drawn = picture.get_attribute("src")
    verdict = calculator.locator("p b")
    calculator.locator(".widget-slider", has_text="tokens each").get_by_role("slider").focus()
    for _ in range(2):
        told = verdict.inner_text()
        lab.page.keyboard.press("ArrowRight")
        wait_until(lambda told=told: verdict.inner_text() != told)
    assert picture.get_attribute("src") != drawn and picture.get_attribute("alt")


def test_an_exercise_wrong_then_right_and_the_map_knows(lab):
    stub = "def most_answers("
    solution = next(c.source for c in nbformat.read(ROOT / SOLUTION, 4).cells if c.source.startswith(stub))
    lab.tab(MAP).click()
    lab.ready(MAP)
    lab.notebook.get_by_role("link", name="lab 1", exact=True).click()
    lab.ready(LAB)
    lab.run(lab.cell("lab as check"))
    answer, check = lab.cell(stub), lab.cell("check.most_answers(")
    lab.run(answer, "def most_answers(*_, **__):\n    return 1")
    assert lab.run(check).startswith("not yet")
    lab.run(answer, re.sub(r"\n *### (BEGIN|END) SOLUTION", "", solution))
    assert lab.run(check).startswith("passed")
    assert "1 of 6" in lab.run(lab.cell("check.score()"))
    lab.tab(MAP).click()
    lab.ready(MAP)
    assert "1 of 6" in lab.run(lab.cell("where_you_stand"))


def test_a_silent_cell_says_that_it_runs_and_stopping_it_takes_one_line(lab):
    lab.tab(LESSON).click()
    lab.ready(LESSON)
    lab.cell("figures.against_cards").locator(".cm-content").click()
    lab.page.keyboard.press("ControlOrMeta+A")
    lab.page.keyboard.insert_text("import subprocess\nsubprocess.run(['sleep', '600'])")
    lab.page.keyboard.press("Shift+Enter")
    cell = lab.cell("'600'")
    cell.get_by_text(re.compile(r"running, \d+ s so far")).wait_for()
    lab.notebook.locator("[data-command='notebook:interrupt-kernel']").click()
    lab.idle()
    shown = "\n".join(cell.locator(".jp-OutputArea-output").all_text_contents())
    assert re.fullmatch(r"\s*KeyboardInterrupt: [^\n]*line 2[^\n]*\s*", shown), shown


def test_a_kernel_ends_when_its_notebook_is_closed_and_stays_while_it_is_open(lab, address):
    """Here after 5 idle seconds; `make lab` waits for 30 minutes. The tests above have opened the notebooks."""

    def notebooks() -> set[str]:
        sessions = lab.page.evaluate("address => fetch(address).then(answer => answer.json())", sessions_at)
        return {session["path"] for session in sessions}

    sessions_at = re.sub(r"/lab\S*\?", "/api/sessions?", address)
    assert {LESSON, LAB, MAP} <= notebooks()
    lab.tab(LAB).click()
    lab.ready(LAB)
    lab.page.keyboard.press("ControlOrMeta+s")
    lab.tab(LAB, ".jp-mod-dirty").wait_for(state="detached")  # else JupyterLab asks whether to save
    lab.page.keyboard.press("Alt+w")
    wait_until(lambda: LAB not in notebooks())
    assert {LESSON, MAP} <= notebooks()
