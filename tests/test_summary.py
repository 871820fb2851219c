"""What `make test` ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUMMARY = Path(__file__).with_name("summary.py")
PLANTED = """
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("clearing up")

def test_passes(): ...
@pytest.mark.parametrize("x", [1, 2])
def test_one_of_two(x): assert x == 1, "planted\\nin two lines"
class TestInside:
    def test_twice_wrong(self, broken): raise ValueError("test")
def test_afterwards(broken): ...
@pytest.mark.skip
def test_skipped(): ...
"""


def run_of(folder: Path, **files: str) -> tuple[str, str]:
    """The report and the exit code of pytest over these files."""
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml=report.xml", "-o", "junit_family=xunit1"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    return str(folder / "report.xml"), str(done.returncode)


def summary_of(folder: Path, *runs: str) -> tuple[int, list[str]]:
    command = [sys.executable, SUMMARY, folder / "summary.txt", *runs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    lines = done.stdout.split("\n")[1:-1]
    assert (folder / "summary.txt").read_text().splitlines() == lines
    return done.returncode, lines


def test_the_summary_names_every_failure_of_every_run(tmp_path):
    first = run_of(tmp_path / "first", test_a=PLANTED)
    second = run_of(tmp_path / "second", test_b="def test_passes(): ...")
    third = run_of(tmp_path / "third", test_c="import nothing_of_this_name")
    assert summary_of(tmp_path, *second, *second) == (0, ["2 passed, 0 failed, 0 skipped"])
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


def test_a_run_that_broke_off_counts_as_failed(tmp_path):
    report, _ = run_of(tmp_path / "run", test_b="def test_passes(): ...")
    missing = str(tmp_path / "missing.xml")
    assert summary_of(tmp_path, report, "3", missing, "137") == (
        1,
        [
            f"FAILED {report}: pytest ended with exit code 3 and named no test",
            f"FAILED {missing}: pytest ended with exit code 137 and left no report",
            "1 passed, 2 failed, 0 skipped",
        ],
    )
