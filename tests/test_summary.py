"""What `make test` ends with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

SUMMARY = Path(__file__).with_name("summary.py")
INHERITED = """
class Inherited:
    def test_twice_wrong(self, broken): raise ValueError("test")
"""
PLANTED = """
import elsewhere
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("clearing up")

def test_passes(): ...
@pytest.mark.parametrize("x", [1, 2])
def test_one_of_two(x): assert x == 1, "planted\\nin two lines"
class TestInside(elsewhere.Inherited): ...
def test_afterwards(broken): ...
@pytest.mark.skip
def test_skipped(): ...
"""
ONCE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("x", {names})
def test_fails_once(x):
    seen = Path(f"seen-{{x}}")
    if not seen.exists():
        seen.touch()
        raise TimeoutError("the first time")
"""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", "-p", "no:cacheprovider"]


@pytest.fixture(autouse=True)
def only_the_plugins_that_it_names(monkeypatch, tmp_path):
    """Loading all of them takes longer than all that is tested here."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")


def run_of(folder: Path, file: str, text: str = "", *options: str) -> tuple[str, str]:
    """The report and the exit code of pytest over one file."""
    if text:
        (folder / file).write_text(text)
    report = f"{Path(file).stem}.xml"
    command = [*PYTEST, f"--junitxml={report}", *options, file]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    return report, str(done.returncode)


def summary_of(folder: Path, *runs: str) -> tuple[int, list[str]]:
    """The exit code of the summary, and its lines after the minutes."""
    command = [sys.executable, SUMMARY, "summary.txt", *runs]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not done.stderr
    minutes, *lines = (folder / "summary.txt").read_text().splitlines()
    assert minutes.startswith("Minutes: ")
    assert done.stdout.endswith("\n".join(["", minutes, *lines, ""]))
    return done.returncode, lines


def test_the_summary_names_every_failure_of_every_run(tmp_path):
    (tmp_path / "elsewhere.py").write_text(INHERITED)
    first = run_of(tmp_path, "test_a.py", PLANTED)
    second = run_of(tmp_path, "test_b.py", "def test_passes(): ...")
    third = run_of(tmp_path, "test_c.py", "import nothing_of_this_name")
    assert summary_of(tmp_path, *second) == (0, ["1 passed, 0 failed, 0 skipped"])
    assert summary_of(tmp_path, *first, *second, *third) == (
        1,
        [
            "FAILED test_a.py::test_one_of_two[2]: AssertionError: planted",
            "FAILED test_a.py::TestInside::test_twice_wrong: ValueError: test",
            'FAILED test_a.py::test_afterwards: failed on teardown with "RuntimeError: clearing up"',
            "FAILED test_c.py::test_c: ModuleNotFoundError: No module named 'nothing_of_this_name'",
            "3 passed, 4 failed, 1 skipped",
        ],
    )


def test_what_fails_once_has_passed_alone_and_what_fails_twice_has_failed(tmp_path):
    once = run_of(tmp_path, "test_once.py", ONCE.format(names=["a"]))
    twice = run_of(tmp_path, "test_twice.py", "def test_passes(): ...\ndef test_fails(): raise OSError('always')")
    alone = "passed alone: test_once.py::test_fails_once[a], first: TimeoutError: the first time"
    assert summary_of(tmp_path, *once) == (0, [alone, "1 passed, 0 failed, 0 skipped"])
    (tmp_path / "seen-a").unlink()
    once = run_of(tmp_path, "test_once.py")
    assert summary_of(tmp_path, *once, *twice) == (
        1,
        [alone, "FAILED test_twice.py::test_fails: OSError: always", "2 passed, 1 failed, 0 skipped"],
    )


def test_more_than_three_that_pass_only_alone_fail_the_suite(tmp_path):
    run = run_of(tmp_path, "test_once.py", ONCE.format(names=list("abcd")))
    code, lines = summary_of(tmp_path, *run)
    assert code == 1 and [line.split(":")[0] for line in lines] == 4 * ["passed alone"] + ["FAILED", lines[-1]]
    assert lines[-1] == "4 passed, 0 failed, 0 skipped"


def test_where_much_is_broken_nothing_runs_again(tmp_path):
    run = run_of(tmp_path, "test_once.py", ONCE.format(names=list("abcdefghijk")))
    code, lines = summary_of(tmp_path, *run)
    assert code == 1 and lines[-1] == "0 passed, 11 failed, 0 skipped"


def test_a_notebook_gets_its_second_chance_as_a_whole(tmp_path):
    first_time = "import pathlib\nseen = pathlib.Path('seen').exists()\npathlib.Path('seen').touch()\nassert seen"
    sources = ["x = 1", first_time, "y = x / seen"]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p nbval.plugin --nbval-lax\n")
    run = run_of(tmp_path, "a.ipynb")
    code, lines = summary_of(tmp_path, *run)
    assert code == 0 and lines[-1] == "3 passed, 0 failed, 0 skipped"
    assert lines[:-1] == ["passed alone: a.ipynb, first: AssertionError:"]


def test_a_test_that_cannot_be_stopped_ends_with_its_worker_and_is_named(tmp_path):
    stuck = "import ctypes\ndef test_passes(): ...\ndef test_stuck(): ctypes.PyDLL(None).sleep(60)"  # keeps the GIL
    settings = "[pytest]\naddopts = -p xdist\nfaulthandler_timeout = 2\nfaulthandler_exit_on_timeout = true\n"
    (tmp_path / "pytest.ini").write_text(settings)
    run = run_of(tmp_path, "test_stuck.py", stuck, "-n", "1", "--dist", "loadfile")
    code, lines = summary_of(tmp_path, *run)
    assert code == 1 and lines[-1] == "1 passed, 1 failed, 0 skipped"
    assert lines[0].startswith("FAILED test_stuck.py::test_stuck: ")


def test_a_run_that_broke_off_counts_as_failed(tmp_path):
    report, _ = run_of(tmp_path, "test_b.py", "def test_passes(): ...")
    assert summary_of(tmp_path, report, "3", "missing.xml", "137") == (
        1,
        [
            f"FAILED {report}: pytest ended with exit code 3 and named no test",
            "FAILED missing.xml: pytest ended with exit code 137 and left no report",
            "1 passed, 2 failed, 0 skipped",
        ],
    )
