"""What a learner sees of a verdict, and the score of a lab."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from course_checks.harness import checking
from course_checks.harness.checking import Lab, NotYet, Verdict
from course_lib.notebook import progress

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path))
    progress._store.cache_clear()


def a_lab(complaint: str) -> Lab:
    lab = Lab("99_test", title="A test")

    @lab.exercise("Twice as much", importance=3, difficulty=2, minutes=10)
    def double(f):
        if complaint:
            raise NotYet(complaint)

    return lab


def shell(monkeypatch, notebook: bool) -> list:
    shown: list = []
    fake = types.ModuleType("IPython")
    fake.get_ipython = lambda: types.SimpleNamespace(**({"kernel": 1} if notebook else {}))
    fake_display = types.ModuleType("IPython.display")
    fake_display.display = lambda data, raw: shown.append((data, raw))
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", fake_display)
    return shown


def test_a_notebook_gets_a_block_that_is_escaped_and_a_text_twin(monkeypatch, capsys):
    shown = shell(monkeypatch, notebook=True)
    evil = "<script>alert('x')</script> & \"more\""
    a_lab(evil).double(print)
    [(data, raw)] = shown
    assert raw and data["text/plain"] == f"not yet: {evil}" and capsys.readouterr().out == ""
    assert "<script" not in data["text/html"] and "&lt;script&gt;" in data["text/html"]
    assert "<strong>not yet</strong>" in data["text/html"] and "&amp; &quot;more&quot;" in data["text/html"]


def test_a_terminal_gets_a_line(monkeypatch, capsys):
    assert shell(monkeypatch, notebook=False) == []
    a_lab("").double(print)
    assert capsys.readouterr().out == "passed\n"


def test_the_three_blocks_differ_by_word_and_colour():
    blocks = [Verdict("x", status, "", 0).to_html() for status in checking.COLOURS]
    assert len({block.split("border-left:5px solid ")[1][:7] for block in blocks}) == 3
    assert [word in block for word, block in zip(checking.COLOURS, blocks, strict=True)] == [True] * 3


def test_the_verdict_is_shown_once_in_a_real_notebook_cell():
    """The call is the cell's last line: what it returns must not be displayed a second time."""
    formatters = pytest.importorskip("IPython.core.formatters")
    assert formatters.DisplayFormatter().format(Verdict("x", "passed", "", 0.0)) == ({}, {})


def three() -> Lab:
    lab = Lab("04_ddp_accelerate", title="DDP")

    @lab.exercise("Your own DDP", importance=1, difficulty=1, minutes=1)
    def zulu(f):
        return f()

    @lab.exercise("A sampler", importance=1, difficulty=1, minutes=1)
    def alpha(f):
        return f()

    @lab.exercise("Find the bug", importance=1, difficulty=1, minutes=1)
    def mike(f):
        return f()

    return lab


NONE = """\
[ ] 1 Your own DDP - not attempted
[ ] 2 A sampler - not attempted
[ ] 3 Find the bug - not attempted
Lab 4: 0 of 3 passed
"""


def test_the_score_of_an_untouched_lab(capsys):
    lab = three()
    assert lab.score_text({}) + "\n" == NONE
    lab.score()
    assert capsys.readouterr().out == NONE


def test_the_score_counts_this_kernels_last_verdicts(capsys):
    lab = three()
    lab.mike(lambda: str(3))
    lab.zulu(lambda: str(3))
    lab.zulu(lambda: 1 / 0)
    lab.mike(lambda: str(3))
    capsys.readouterr()
    assert lab.score() is None
    assert capsys.readouterr().out == (
        "[ ] 1 Your own DDP - not yet\n[ ] 2 A sampler - not attempted\n[x] 3 Find the bug - passed\n"
        "Lab 4: 1 of 3 passed\n"
    )
    kept = progress.load().labs["04_ddp_accelerate"]
    assert {name: (record.status, record.tries) for name, record in kept.items()} == {
        "mike": ("passed", 1),
        "zulu": ("passed", 1),  # the best remains
    }
    assert three().verdicts == {}  # a new kernel starts from nothing


def test_statuses_of_unknown_exercises_are_refused():
    with pytest.raises(ValueError, match="no exercise 'zul'"):
        three().score_text({"zul": "passed"})


def test_a_misspelt_exercise_gets_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'zulu'"):
        three().zulo  # noqa: B018


def test_definitions_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="04_ddp_accelerate"):
        Lab("ddp", title="")
    lab = three()
    for name in ("zulu", "score", "verdicts"):
        with pytest.raises(ValueError, match=f"called '{name}'"):
            lab.exercise("x", importance=1, difficulty=1, minutes=1)(
                types.FunctionType(compile("0", "f", "eval"), {}, name)
            )
    with pytest.raises(ValueError, match="from 1 to 5"):
        lab.exercise("x", importance=6, difficulty=1, minutes=1)


def test_the_notebook_sees_title_and_minutes():
    exercise = three().zulu
    assert (exercise.title, exercise.importance, exercise.difficulty, exercise.minutes) == ("Your own DDP", 1, 1, 1)


def test_importing_the_contract_needs_no_torch():
    code = "import sys, course_checks.harness.checking; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
