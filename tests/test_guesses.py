"""The reader's guess: typed into a box, kept, and held against a measurement that waits for it."""

from __future__ import annotations

import base64
import re

import nbformat
import pytest
from nbclient import NotebookClient
from refusals import assert_refused

from course_lib.colab import NOTEBOOK
from course_lib.notebook import ask, guesses, measured, progress, table
from course_lib.notebook.amounts import read_amount
from course_lib.notebook.guesses import Guess, Measurement

MIB, GIB = 2**20, 2**30
QUESTION = "Peak of a ZeRO-2 step"


@pytest.fixture(autouse=True)
def somebody(tmp_path, monkeypatch):
    """A person in JupyterLab, with a progress file of their own."""
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path))
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/lessons/05_zero.ipynb")
    monkeypatch.delenv(NOTEBOOK, raising=False)
    another_kernel()


def another_kernel() -> None:
    guesses._live.clear()
    progress._store.cache_clear()


def kept() -> dict[str, tuple[float | None, float | None]]:
    """{question: (guess, measured)} of the progress file, as another process would read it."""
    records = progress.read(progress.progress_path()).guesses.get("05_zero", {})
    return {question: (record.guess, record.measured) for question, record in records.items()}


def remark(guess: Guess) -> str:
    return re.sub("<[^>]*>|&ensp;", " ", guess._remark.value).strip()


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, in order."""
    outputs = []
    monkeypatch.setattr("IPython.display.display", outputs.append)
    return outputs


def text_of(widget) -> str:
    """What a reader sees of a widget's own text."""
    parts = [getattr(widget, "value", ""), getattr(widget, "description", "")]
    return " ".join([*map(str, parts), *map(text_of, getattr(widget, "children", ()))])


@pytest.mark.parametrize(
    ("typed", "unit", "number"),
    [
        ("2.4 GiB", "GiB", 2.4),
        ("2400 MiB", "GiB", 2400 / 1024),
        ("2400mib", "GiB", 2400 / 1024),
        ("1,607,936", "bytes", 1607936),
        ("4 * 135e6", "bytes", 54e7),
        ("3/4", "", 0.75),
        ("~ .5", "", 0.5),
        ("1.2 billion", "", 1.2e9),
        ("12k tokens", "tokens", 12000),
        ("2 ms", "s", 0.002),
        ("3x", "times", 3),
        ("37 %", "%", 37),
        ("2**20 / 4", "bytes", 2**18),
        ("4*3*2", "", 24),
        ("+3.", "", 3),
        ("1 000 000", "", 1e6),
        ("5 milliseconds", "ms", 5),
        ("2 µs", "us", 2),  # the micro sign, and the Greek letter
        ("2 μs", "us", 2),
    ],
)
def test_a_number_is_read_in_the_units_of_its_kind(typed, unit, number):
    assert read_amount(typed, unit) == pytest.approx(number)


UNREADABLE = [
    "two",
    "2,4",
    "-1 GiB",
    "−1 GiB",
    "2.4 Gb",
    "9**9**9",
    "-3^0.5",
    "3 s",
    "GiB",
    "2.4 G",
    "1e999",
    "1e308",
    "1e-40",
    "1/0",
    "nan",
    "2 GiB or so",
    "2.4.1",
    "<b>",
]


def test_what_cannot_be_read_is_told_in_the_box_and_changes_nothing():
    assert_refused([(lambda text=text: read_amount(text, "GiB"), ValueError, "") for text in UNREADABLE])
    guess = ask(QUESTION, "GiB")
    for text in UNREADABLE:
        guess._box.value = text
        assert guess.value is None and "No guess yet" in remark(guess) and guess._box.value == text, text
        assert "<b>" not in guess._remark.value
    guess._box.value = "3"
    guess._box.value = "3 Gibbons"
    assert guess.value == 3 and "still 3" in remark(guess) and kept() == {QUESTION: (3, None)}
    guess._box.value = "  "
    assert guess.value is None and kept() == {}


def test_the_measurement_is_folded_until_there_is_a_guess(shown):
    guess = ask(QUESTION, "GiB")
    measured(guess, 2.05 * GIB, formula=1.9 * GIB, parts={"all-gather buffer": 0.1 * GIB})
    answer = shown[-1]
    assert "2.05" not in text_of(answer) and kept() == {}
    guess._box.value = "2000 MiB"
    assert all(
        part in text_of(answer) for part in ("2.05 GiB measured", "1.9 by formula", "unexplained +0.05", "4.7 % low")
    )
    assert kept() == {QUESTION: (2000 / 1024, pytest.approx(2.05))}
    guess._box.value = "2.05"
    assert "no longer counts" in remark(guess) and kept()[QUESTION][0] == guess.value == 2000 / 1024


def test_who_skips_sees_the_measurement_and_has_guessed_nothing(shown):
    guess = ask(QUESTION, "MiB")
    measured(guess, 96 * MIB)
    box, skip, beside = shown[-1].children[0].children
    assert box is guess._box
    box.value = "two"  # told where it was typed
    assert "not a number" in beside.value
    skip.click()
    assert "96 MiB measured" in text_of(shown[-1]) and "no guess" in text_of(shown[-1])
    assert kept() == {QUESTION: (None, 96)} and progress.load().guesses["05_zero"][QUESTION].factor is None


def test_what_a_click_finishes_typing_is_a_guess(shown):
    guess = ask(QUESTION, "MiB")
    measured(guess, 96 * MIB, then=table([{"all of it": 96}]))
    skip = shown[-1].children[0].children[1]
    assert "all of it" not in text_of(shown[-1])
    guess._box.value = "100"  # as the box loses its focus
    skip.click()
    assert kept() == {QUESTION: (100, 96)} and "all of it" in text_of(shown[-1])


def test_a_question_asked_again_is_the_same_guess_and_a_seen_answer_stays_seen(shown):
    guess = ask(QUESTION, "MiB")
    measured(guess, 96 * MIB)
    measured(guess, 96 * MIB)
    folded = shown[-2:]
    again = ask(QUESTION, "MiB")  # its cell has run once more
    again._box.value = "100"
    assert all("96 MiB measured" in text_of(output) for output in folded)
    guesses._live.clear()  # the same lesson in two kernels, whose boxes stand beside each other
    other = ask(QUESTION, "MiB")
    other._record = None
    other._box.value = "96"
    assert kept() == {QUESTION: (100, 96)} and other.value == 100


def test_a_guess_before_the_run_unfolds_at_once_and_survives_a_restart(shown, monkeypatch):
    ask(QUESTION, "MiB")._box.value = "100"
    another_kernel()
    again = ask(QUESTION, "MiB")
    assert (again.value, again._box.value) == (100, "100")
    measured(again, 96 * MIB)
    assert "96 MiB measured" in text_of(shown[-1]) and kept() == {QUESTION: (100, 96)}
    another_kernel()
    measured(ask(QUESTION, "MiB"), 80 * MIB)  # the reader changed the cell: shown, and the first answer stays
    assert "80 MiB measured" in text_of(shown[-1]) and kept() == {QUESTION: (100, 96)}
    assert ask(QUESTION, "s").value is None  # the lesson asks for something else now
    monkeypatch.setenv("JPY_SESSION_NAME", "lessons/06_fsdp.ipynb")
    assert ask(QUESTION, "MiB").value is None


def test_units_are_known_and_questions_too():
    assert_refused(
        [(lambda: ask(QUESTION, "Gib"), ValueError, "GiB"), (lambda: ask(QUESTION, None), ValueError, "unit")]
    )


CELLS = [
    "from course_lib.notebook import ask, measured, takes, waiting\nwaiting.SILENT = 600",
    "takes(seconds=5)\nguess = ask('Bytes of x', unit='MiB')",
    f"measured(guess, {4 * MIB}, formula={2 * MIB})",
]


def run_cells(cells, folder) -> list[list]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return [cell.outputs for cell in notebook.cells]


def test_executed_without_a_person_nothing_waits_and_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME")
    _, [asked], [shown] = run_cells(CELLS, tmp_path)
    assert sorted(asked.data) == sorted(shown.data) == ["text/html", "text/plain"]
    assert "4 MiB measured" in shown.data["text/plain"] and "<details>" in shown.data["text/html"]
    assert "guess" not in str(Measurement("q", "", 3)) and not progress.progress_path().exists()


def test_in_front_of_a_person_run_all_goes_past_the_box_and_the_answer_stays_folded(tmp_path):
    _, asked, [folded] = run_cells(CELLS, tmp_path)
    assert "4 MiB" not in folded.data["text/plain"] and "<details>" in folded.data["text/html"]
    assert any("application/vnd.jupyter.widget-view+json" in output.data for output in asked)


def run_in_front_of_a_person(cells: list[str], folder) -> list[list]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    options = {"kernel_name": "python3", "allow_errors": True, "resources": {"metadata": {"path": folder}}}
    NotebookClient(notebook, **options).execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_long_cell_says_how_long_it_takes_and_a_short_one_nothing(tmp_path):
    _, timed, long, _, captured, short = run_in_front_of_a_person(
        [
            "from course_lib.notebook import takes, waiting\nwaiting.SILENT, waiting.EVERY = 0.3, 0.1\nimport time",
            "takes(seconds=60)\ntime.sleep(0.2)\n1 / 0",
            "time.sleep(1)\nprint('done')",
            "%%capture\ntime.sleep(0.6)",  # a cell in a cell
            "from IPython.utils.capture import capture_output\nwith capture_output() as own:\n    time.sleep(1)\nprint(len(own.outputs))",
            "import threading\nprint([thread.name for thread in threading.enumerate() if 'cell' in thread.name])",
        ],
        tmp_path,
    )
    assert timed[0].data["text/plain"] == "" and timed[-1].ename == "ZeroDivisionError", "the line has gone"
    assert long[0].data["text/plain"] == "" and long[1].text == "done\n"
    assert captured[-1].text == "0\n", "the line stands below the cell, and not in what the cell captured"
    assert [output.get("text") for output in short] == ['["a cell\'s status line"]\n'], "its own: the others have ended"


def test_an_interrupted_cell_shows_one_line_and_where(tmp_path):
    _, [stopped] = run_in_front_of_a_person(
        ["import os, signal, course_lib.notebook", "pid = os.getpid()\n\nos.kill(pid, signal.SIGINT)"], tmp_path
    )
    assert stopped.ename == "KeyboardInterrupt" and len(stopped.traceback) == 1 and "line 3" in stopped.traceback[0]


def test_a_picture_shows_what_differs_and_nothing_else():
    from course_lib.figures.guess import dot_plot

    for numbers in ({"measured": 4, "formula": 4}, {"measured": 4.0000001, "formula": 4}, {"measured": 0}):
        assert dot_plot(Measurement("q", "", **numbers), alt="x") is None
    for numbers in ({"measured": 4, "guess": 4}, {"measured": 2, "guess": 3000.0}, {"measured": 0, "guess": 2}):
        page = Measurement("q", "", **numbers).page(folded=False, asked=True)._repr_html_()
        assert base64.b64decode(re.search("base64,([^']*)", page)[1]).startswith(b"<svg")


def test_colabs_first_cell_names_the_lesson(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert not guesses.somebody_looks_on()
    monkeypatch.setenv(NOTEBOOK, "lessons/01_gpu_memory.ipynb")
    assert guesses.somebody_looks_on() and guesses.lesson_here() == "01_gpu_memory"
