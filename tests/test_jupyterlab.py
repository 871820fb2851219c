"""The course in JupyterLab, as a person uses it: by mouse and keyboard, in a browser."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import psutil
import pytest
from browser import chromium, executable, shot
from lab_page import MAP, PATIENCE, ROOT, Lab, Server, alive, within

from course_lib.notebook import progress

# one server and one page for all: they stay together, in this order, where tests are spread over processes
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("jupyterlab")]
LESSON, LAB, SOLUTION = (f"{folder}/01_gpu_memory.ipynb" for folder in ("lessons", "labs", "solutions"))
# What a lesson puts on the page, without its measurements: the lesson's own cells run in a kernel as tests of their own.
LESSON_CELLS = [
    "from course_lib import figures\n"
    "from course_lib.memory import CARDS, estimate\n"
    "from course_lib.notebook.ledger import entries, measured, predict\n"
    "from course_lib.notebook.widgets.calculator import calculator\n"
    "need = estimate('llama-3.1-8b')",
    "predict('peak', 60, 'GiB', lesson='01_gpu_memory')\nmeasured('peak', need.peak, 'bytes')",
    "figures.against_card({'8B': need}, card=CARDS['t4'].memory, card_name='t4', title='Will it fit?')",
    "calculator()",
    "figures.ledger(entries())",
]
SCRATCH = "lessons/scratch.ipynb"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
ASLEEP = """\
import os, time
from course_lib.launch import launch

def asleep():
    print("rank is up as process", os.getpid())
    time.sleep(1000)

print("kernel process", os.getpid())
launch(asleep, ranks=2, timeout=900)"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    executable()  # no server where there is no browser to look at it
    folder = Path(tempfile.mkdtemp(prefix="b1g-lab-"))
    started = Server(folder, [MAP, LAB])
    short = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in LESSON_CELLS], metadata={"kernelspec": KERNEL}
    )
    nbformat.write(short, started.course / LESSON)
    cells = [nbformat.v4.new_code_cell(ASLEEP), nbformat.v4.new_code_cell("print('the kernel', 'lives')")]
    scratch = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    nbformat.write(scratch, started.course / SCRATCH)
    yield started
    started.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def lab(server) -> Iterator[Lab]:
    with chromium() as browser:
        lab = Lab(browser.new_page(viewport={"width": 1400, "height": 900}), server.course)
        with station(lab, server, "0-opened"):
            lab.page.goto(server.address())
            lab.ready(MAP)
        yield lab


@contextmanager
def station(lab: Lab, server: Server, name: str) -> Iterator[None]:
    """A picture of the page at the end, or of what went wrong, with what the server and the page said."""
    try:
        yield
    except BaseException:
        print(f"The server's last lines:\n{server.log_tail()}\nErrors on the page: {lab.errors}")
        shot(lab.page, f"lab-{name}-failed")
        raise
    shot(lab.page, f"lab-{name}")


def outputs(notebook: Path) -> list[nbformat.NotebookNode]:
    """Every output that a saved notebook holds."""
    return [output for cell in nbformat.read(notebook, 4).cells for output in cell.get("outputs", [])]


def test_the_map_leads_to_a_lesson_which_runs(lab, server):
    with station(lab, server, "1-map"):
        assert not lab.page.locator(".Toastify__toast").count(), "a message covers a corner of the page"
        lab.notebook.get_by_role("heading", name="Start here").wait_for()
    with station(lab, server, "2-lesson"):
        lab.notebook.get_by_role("link", name="Where GPU memory goes").click()
        lab.ready(LESSON)
    with station(lab, server, "3-lesson-has-run"):
        lab.menu("Run", "Run All Cells")
        lab.notebook.locator(".jp-InputPrompt", has_text="[*]").first.wait_for(state="attached")
        lab.idle()
        lab.save(LESSON)
        written = outputs(server.course / LESSON)
        assert not [o for o in written if o.output_type == "error"]
        ledger = progress.read(server.home / "progress" / "progress.json").ledger["01_gpu_memory"]
        assert list(ledger) == ["peak"] and ledger["peak"].measured
        seen = lab.pictures()
        assert len(seen) == 3 and all(width > 400 for width, _ in seen), seen
        assert all(alt for _, alt in seen), "JupyterLab shows a picture without its text"
        lab.notebook.locator(".jp-OutputArea img").last.scroll_into_view_if_needed()


def test_a_slider_of_the_calculator_moves_by_keyboard(lab, server):
    with station(lab, server, "4-calculator"):
        lab.to(LESSON)
        calculator = lab.notebook.locator(".jp-OutputArea-output", has=lab.page.locator(".widget-slider")).last
        calculator.scroll_into_view_if_needed()
        verdict, picture = calculator.locator("p b"), calculator.locator("img")
        before, drawn = verdict.text_content(), picture.get_attribute("src")
        assert " on 1 x " in before and "does not fit" in before
        calculator.locator(".widget-slider", has_text="GPUs").get_by_role("slider").focus()
        for gpus in (2, 4):
            lab.page.keyboard.press("ArrowRight")
            calculator.locator("p b", has_text=f" on {gpus} x ").wait_for()
        assert "GiB to spare" in verdict.text_content()
        assert picture.get_attribute("src") != drawn and len(picture.get_attribute("alt")) > 20
        assert picture.evaluate("i => i.naturalWidth") > 400


def test_an_exercise_wrong_then_right(lab, server):
    stub = "def count_parameters("
    solution = next(c.source for c in nbformat.read(ROOT / SOLUTION, 4).cells if c.source.startswith(stub))
    right = re.sub(r"\n *### (BEGIN|END) SOLUTION", "", solution)
    with station(lab, server, "5-lab"):
        lab.to(MAP)
        lab.notebook.get_by_role("link", name="lab", exact=True).first.click()
        lab.ready(LAB)
    with station(lab, server, "6-score-before"):
        lab.run(lab.cell("lab as check"))
        assert "0 of 8 passed" in lab.run(lab.cell("check.score()"))
    answer, check = lab.cell(stub), lab.cell("check.count_parameters(")
    with station(lab, server, "7-not-yet"):
        answer.locator(".cm-line", has_text="raise NotImplementedError").click()
        lab.page.keyboard.press("Home")
        lab.page.keyboard.press("Shift+End")
        lab.page.keyboard.type("return layers * hidden")
        lab.run(answer)
        assert lab.run(check).startswith("not yet: ")
    with station(lab, server, "8-passed"):
        lab.write(answer, right)
        lab.run(answer)
        assert lab.run(check).startswith("passed: ")
    with station(lab, server, "9-score-after"):
        assert "1 of 8 passed" in lab.run(lab.cell("check.score()"))
    with station(lab, server, "10-where-you-stand"):
        lab.to(MAP)
        said = lab.run(lab.cell("where_you_stand"))
        assert "1 of 8" in said and f"in {LAB}" in said, (
            said
        )  # lab 1 has one exercise less to do, and is what comes next


def launch_asleep(lab: Lab) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Start two ranks that sleep. Once they are up: (the two ranks, all that runs below the kernel)."""
    cell = lab.cell("launch(asleep")
    lab.start(cell)
    up = re.compile(r"(?:kernel|rank is up as) process (\d+)")
    assert within(PATIENCE, lambda: len(up.findall(lab.text(cell))) == 3), lab.text(cell)
    kernel, *ranks = (psutil.Process(int(number)) for number in up.findall(lab.text(cell)))
    below = kernel.children(recursive=True)
    assert set(ranks) < set(below)
    return ranks, below


def test_interrupt_restart_and_the_servers_end_leave_no_process(lab, server):
    with station(lab, server, "11-interrupted"):
        lab.page.locator(".jp-DirListing-item", has_text=Path(SCRATCH).name).dblclick()
        lab.ready(SCRATCH)
        ranks, _ = launch_asleep(lab)
        lab.page.keyboard.press("Escape")
        lab.page.keyboard.press("i")
        lab.page.keyboard.press("i")
        assert within(10, lambda: not any(map(alive, ranks))), ranks
        lab.idle()
        assert "KeyboardInterrupt" in lab.text(lab.cell("launch(asleep"))
        assert "the kernel lives" in lab.run(lab.cell("the kernel"))
    with station(lab, server, "12-restarted"):
        _, below = launch_asleep(lab)
        lab.menu("Kernel", "Restart Kernel…")
        lab.page.get_by_role("button", name="Confirm Kernel Restart").click()
        assert within(10, lambda: not any(map(alive, below))), below
        lab.idle()
        assert not server.folders()
    with station(lab, server, "13-before-the-end"):
        _, below = launch_asleep(lab)
        server.processes()
    assert server.stop() == []
    assert not any(map(alive, below)) and not server.folders()
