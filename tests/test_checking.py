"""What comes out of a check: one of three words, the learner's own line, and never the course's own bug as theirs."""

import functools
import linecache
import math
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import assert_refused

import course_checks
from course_checks.harness import Contract, LiveTensors, checking, gives
from course_checks.harness.checking import Lab, NotYet, Verdict, close, returned
from course_lib.launch import RankFailed, RanksHung, launch
from course_lib.notebook import progress

ROOT = Path(course_checks.__file__).parent


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path))
    progress._store.cache_clear()


def course_code(source: str, **names) -> dict:
    """Run `source` as if it stood in course_checks/lab99.py, so that its frames are the course's."""
    names |= {"__name__": "course_checks.lab99", "NotYet": NotYet, "close": close, "returned": returned}
    exec(compile(source, str(ROOT / "lab99.py"), "exec"), names)
    return names


def a_lab(body: str = "return make()", head: str = "def double(make):", **names) -> Lab:
    lab = Lab("99_test", title="A test")
    source = f"@lab.exercise('Twice as much', importance=3, difficulty=2, minutes=10)\n{head}\n    {body}\n"
    course_code(source, lab=lab, **names)
    return lab


def cell(source: str) -> dict:
    """Run `source` as a notebook cell whose lines a traceback can show."""
    name = "<cell 7>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    return names


def verdict_on(source: str, lab: Lab | None = None) -> Verdict:
    return (lab or a_lab()).double(cell(source)["f"])


def failed(kind: str, message: str = "", where: str = "") -> RankFailed:
    return RankFailed("a long report", 1, kind, message, where)


# -------------------------------------------------------------------------------- the three words
def test_the_words_and_the_evidence(capsys):
    verdict = a_lab("make(); return '2 ranks; 5.6 MB a rank a step'").double(lambda: print(end=""))
    assert (verdict.exercise, verdict.status, verdict.message) == ("double", "passed", "2 ranks; 5.6 MB a rank a step")
    assert capsys.readouterr().out == f"{verdict}\n"
    assert a_lab("make()").double(lambda: print(end="")).message == ""
    verdict = a_lab("raise NotYet('you summed where DDP averages')").double(print)
    assert (verdict.status, verdict.message) == ("not yet", "you summed where DDP averages")


STUBS = (
    "def f():\n    raise NotImplementedError  # your code here",
    "def f():\n    '''Doc.'''\n    raise NotImplementedError('later')",
    "def f():\n    x = 3\n    raise NotImplementedError",
    "def f(a, b=2):\n    '''Doc.'''\n    return ...",
    "class f:\n    def __init__(self):\n        raise NotImplementedError\n    def forward(self, x):\n        return self.m(x)",
    "class f:\n    def __init__(self, model):\n        ...\n\n    def forward(self, x): ...",
    "class F:\n    @staticmethod\n    def forward(x):\n        raise NotImplementedError\ndef f(x):\n    return F.apply(x)",
    "f = ...",
)


def test_an_untouched_stub_is_not_attempted_and_its_check_does_not_run(capsys):
    for stub in STUBS:
        assert verdict_on(stub, a_lab("assert False, 'the check ran'")).status == "not attempted", stub
    assert capsys.readouterr().out == "not attempted\n" * len(STUBS)
    assert progress.load().labs == {}  # opening a lab is not a try


def test_what_runs_into_a_stub_is_not_attempted_either():
    source = (
        "def todo():\n    raise NotImplementedError\ndef f():\n    try:\n        todo()\n    finally:\n        pass"
    )
    assert verdict_on(source).status == "not attempted"


def test_a_short_answer_is_an_attempt():
    for answer in (
        "def f():\n    return 4",
        "def f():\n    yield",
        "import functools\nf = functools.partial(max, 1)",
        "def f(x):\n    if x > 3:\n        raise NotImplementedError\n    return x",
    ):
        assert verdict_on(answer, a_lab("return 'seen'")).status == "passed", answer


# -------------------------------------------------------------------------------- the learner's mistakes
def test_the_learners_exception_names_the_learners_line():
    for source, kind, line in (
        ("def f():\n    return g()\n\ndef g():\n    return 1 / 0", "ZeroDivisionError", "line 5: `return 1 / 0`"),
        ("def f():\n    assert 1 > 2, 'my own check'", "AssertionError: my own check", "line 2"),
        ("import sys\ndef f():\n    sys.exit(3)", "SystemExit: 3", "line 3"),
        ("class Odd(Exception):\n    __str__ = None\ndef f():\n    raise Odd", "Odd: (", "line 4"),
        ("def f():\n    raise ValueError('a\\n' * 5000)", "ValueError: a a", "line 2"),
    ):
        verdict = verdict_on(source)
        assert verdict.status == "not yet" and kind in verdict.message and line in verdict.message, verdict
        assert "\n" not in verdict.message and len(verdict.message) < 500


def test_a_notimplementederror_of_a_library_is_not_a_stub():
    names = cell("def f():\n    return kernel()")
    names["kernel"] = course_code("def kernel():\n    raise NotImplementedError('no Half')")["kernel"]
    verdict = a_lab().double(names["f"])
    assert verdict.status == "not yet" and "no Half" in verdict.message and "line 2" in verdict.message


def test_a_keyboard_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt):
        verdict_on("def f():\n    raise KeyboardInterrupt")


def test_a_result_in_the_place_of_the_function():
    for arguments in ((), (len, len), (3,), (None,)):
        verdict = a_lab().double(*arguments)
        assert verdict.status == "not yet" and "check.double(make)" in verdict.message, arguments
    lab = a_lab("return f'{answer}'", head="def double(answer: float):")
    assert lab.double(3).message == "3"
    assert lab.double(None).status == lab.double(...).status == "not attempted"


# -------------------------------------------------------------------------------- the ranks
def test_what_a_launch_raises():
    line = "cell [7], line 2: `raise NotImplementedError  # your code here`"
    for error, status, fragment in (
        (failed("NotImplementedError", "", line), "not attempted", ""),
        (failed("NotImplementedError", "no kernel", "cell [7], line 2: `x @ y`"), "not yet", "line 2: `x @ y`"),
        (failed("NotYet", "rank 1 never sent its shard"), "not yet", "rank 1 never"),
        (failed("AssertionError", "", "cell [7], line 3: `x`"), "not yet", "on rank 1 at cell [7], line 3"),
        (failed("SIGKILL", "rank 1 was ended by SIGKILL"), "not yet", "SIGKILL"),
        (RanksHung("ranks 0, 2 wait in all_reduce"), "not yet", "all_reduce"),
    ):
        verdict = a_lab("raise error", error=error).double(print)
        assert verdict.status == status and fragment in verdict.message, (error, verdict)


def test_real_ranks_from_a_real_launch():
    """The launcher's exceptions as they are, not as this file builds them."""
    lab = a_lab("launch(make, ranks=1, quiet=True, timeout=60); return 'fine'", launch=launch)
    for source, expected in (
        ("def f():\n    for _ in [1]:\n        raise NotImplementedError", "not attempted"),
        ("def f():\n    return 1 / 0", "division by zero on rank 0 at your cell, line 2"),
        ("def f():\n    return 3", "passed"),
        ("def f(x):\n    return 3", "keep the arguments"),
        ("import threading\nlock = threading.Lock()\ndef f():\n    return lock", "cannot travel"),
    ):
        assert expected in str(verdict_on(source, lab)), source


# -------------------------------------------------------------------------------- the course's own bugs
def test_a_bug_in_a_check_raises_and_blames_nobody(capsys):
    names = cell("def f():\n    spy()")
    names["spy"] = course_code("def spy():\n    assert False, 'ours'")["spy"]
    with pytest.raises(AssertionError):
        a_lab().double(names["f"])
    for body in ("assert make() == 5, 'ours'", "undefined_name"):
        lab = a_lab(body)
        with pytest.raises((AssertionError, NameError)):
            verdict_on("def f():\n    return 2 + 2", lab)
        assert lab.verdicts == {}
    for kind in ("AssertionError", "NameError", "unknown"):  # on a rank, without a line of the learner's
        with pytest.raises(RankFailed):
            a_lab("raise error", error=failed(kind, "boom")).double(print)
    assert capsys.readouterr().out == "" and progress.load().labs == {}


# -------------------------------------------------------------------------------- the guard
def test_what_cannot_be_used_is_a_sentence():
    for body in ("make().shape", "1 / (make() - 4)", "{}[make()]"):
        verdict = verdict_on("def f():\n    return 2 + 2", a_lab(body))
        assert verdict.status == "not yet" and "docstring" in verdict.message, body
    verdict = verdict_on("class f:\n    def __init__(self, a, b):\n        self.a = a", a_lab("make(3)"))
    assert verdict.status == "not yet" and "keep the arguments" in verdict.message


def test_an_endless_loop_is_stopped_and_named(monkeypatch):
    monkeypatch.setattr(checking, "LIMIT", 0.3)
    verdict = verdict_on(
        "def f():\n    while True:\n        try:\n            x = 1\n        except:\n            x = 2", a_lab()
    )
    assert verdict.status == "not yet" and "0.3 s" in verdict.message and "at your cell, line" in verdict.message


def test_a_check_computes_on_one_thread_and_gives_the_others_back():
    before = torch.get_num_threads()
    assert a_lab("make(); return str(torch.get_num_threads())", torch=torch).double(print).message == "1"
    assert torch.get_num_threads() == before


def test_inputs_that_are_changed_are_a_sentence():
    def verdict(source, keeps_inputs=True):
        lab = a_lab("make(given); make(given)", given=[7, [1], torch.ones(3)])
        lab.exercises["double"].keeps_inputs = keeps_inputs
        return verdict_on(f"def f(x):\n    {source}", lab)

    for change in ("x.pop()", "x.clear()", "x[1].append(3)", "x[2].mul_(2)", "x[2].data.add_(1)"):
        assert "changes argument 1" in verdict(change).message, change
        assert verdict(f"{change} if x else None", keeps_inputs=False).status == "passed", change
    assert verdict("return x[:2] == [7, [1]]").status == "passed"


# -------------------------------------------------------------------------------- what checks compare with
def test_numbers_of_numpy_and_torch_are_numbers():
    for value in (np.int64(4), torch.tensor(4)):
        assert type(returned(value, int, "x")) is int, value
    assert returned(np.array([1, 2]), tuple, "x") == (1, 2)
    assert_refused(
        [
            (lambda: returned(None, int, "x"), NotYet, "x is missing"),
            (lambda: returned(..., int, "x"), NotYet, "x is missing"),
            (lambda: returned(np.float64(4.5), int, "x"), NotYet, "int, and is"),
            (lambda: returned([3], (int, float), "x"), NotYet, "int or float"),
        ]
    )


def test_close_says_what_is_wrong_and_where():
    grid = np.arange(6.0).reshape(2, 3)
    rows = (
        (grid + [[0, 0, 0.1], [0, 0, 0.25]], grid, "0.25 at [1, 2]:"),
        ([1.0, math.nan], [1.0, 2.0], "yours nan"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "have (3,)"),
        ([[1.0], [1.0, 2.0]], [1.0], "hold numbers"),
        (None, 1.0, "is missing"),
        (3, {"w": 1}, "type Mapping"),
        ({"w": 1}, {"w": 1, "b": 2}, "lacks 'b'"),
        ({"w": torch.ones(2, dtype=torch.bfloat16)}, {"w": 2 * torch.ones(2)}, "at [0]:"),
    )
    compare = functools.partial(close, rtol=1e-3, what="the loss")
    assert_refused((functools.partial(compare, actual, expected), NotYet, word) for actual, expected, word in rows)
    with pytest.raises(ValueError):  # a check that expects nonsense is the course's bug
        compare(1.0, "text")


def test_close_takes_what_is_equal():
    weight = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    close([math.inf, math.nan], [math.inf, math.nan], rtol=0, what="x")
    close({"w": weight, "b": (1, 2)}, {"w": torch.ones(2, 2), "b": np.array([1, 2])}, rtol=0, what="x")
    close(1e-9, 0, rtol=1e-3, atol=1e-8, what="x")


# -------------------------------------------------------------------------------- what is shown of it
def test_a_notebook_gets_an_escaped_block_and_a_text_twin(monkeypatch, capsys):
    shown = []
    shell, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    shell.get_ipython = lambda: SimpleNamespace(kernel=1)
    display.display = lambda data, raw: shown.append(data)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    a_lab("raise NotYet('<script>x</script> & \"more\"')").double(print)
    [data] = shown
    assert data["text/plain"].endswith('<script>x</script> & "more"') and capsys.readouterr().out == ""
    assert "<script" not in data["text/html"] and "&amp; &quot;more" in data["text/html"]
    for status, colour in checking.COLOURS.items():
        block = Verdict("x", status, "", 0).to_html()
        assert status in block and colour in block


def test_the_verdict_is_shown_once_in_a_real_notebook_cell():
    """The call is the cell's last line: what it returns must not be displayed a second time."""
    formatters = pytest.importorskip("IPython.core.formatters")
    assert formatters.DisplayFormatter().format(Verdict("x", "passed", "", 0.0)) == ({}, {})


def three() -> Lab:
    lab = Lab("04_ddp_accelerate", title="DDP")
    for name, title in (("zulu", "Your own DDP"), ("alpha", "A sampler"), ("mike", "Find the bug")):
        check = course_code(f"def {name}(f):\n    return f()")[name]
        lab.exercise(title, importance=1, difficulty=1, minutes=1)(check)
    return lab


def test_the_score_counts_this_kernels_last_verdicts(capsys):
    lab = three()
    lab.mike(lambda: str(3))
    lab.zulu(lambda: str(3))
    lab.zulu(lambda: 1 / 0)
    lab.mike(lambda: str(3))
    capsys.readouterr()
    lab.score()
    assert capsys.readouterr().out == (
        "[ ] 1 Your own DDP - not yet\n[ ] 2 A sampler - not attempted\n[x] 3 Find the bug - passed\nLab 4: 1 of 3 passed\n"
    )
    kept = {name: (record.status, record.tries) for name, record in progress.load().labs[lab.name].items()}
    assert kept == {"mike": ("passed", 1), "zulu": ("passed", 1)}  # the best remains
    assert three().score_text({}).count("not attempted") == 3  # a new kernel starts from nothing


def test_labs_refuse_what_cannot_work():
    def exercise(name, importance=1):
        function = types.FunctionType(compile("0", "f", "eval"), {}, name)
        return three().exercise("x", importance=importance, difficulty=1, minutes=1)(function)

    assert_refused(
        [
            (lambda: Lab("ddp", title=""), ValueError, "ddp"),
            (lambda: exercise("zulu"), ValueError, "'zulu'"),
            (lambda: exercise("score"), ValueError, "'score'"),
            (lambda: exercise("x", importance=6), ValueError, "importance"),
            (lambda: three().score_text({"zul": "passed"}), ValueError, "'zul'"),
            (lambda: three().zulo, AttributeError, "mean 'zulu'"),
        ]
    )


def test_importing_the_contract_needs_no_torch():
    code = "import sys, course_checks.harness.checking; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent).returncode == 0


# ------------------------------------------------------------------------------------------------ clauses and hints
def test_a_clause_that_does_not_hold_says_so_with_the_first_hint_that_fits():
    hints = {
        "you doubled it": lambda facts: facts["clause"] == "the sum" and facts["the sum"] == 6,
        "too much is kept": lambda facts: facts["kept"] > 9,
        "never": lambda facts: facts["unknown"] > 0,
    }

    def broken(clause, **facts):
        contract = Contract(hints, facts)
        try:
            clause(contract)
        except NotYet as error:
            return str(error)
        return contract.evidence()

    told = [
        broken(lambda contract: contract.values("the sum", 6.0, 3.0, rtol=1e-6)),
        broken(lambda contract: contract.memory("the peak", 20, at_most=10), kept=12),
        broken(lambda contract: contract.memory("the peak", 1, at_least=5, at_most=10), kept=1),
        broken(lambda contract: contract.holds(False, "it is late")),
    ]
    parts = (("you doubled it",), ("too much is kept", "20 bytes"), ("at least 5 bytes",), ("it is late",))  # fmt: skip
    assert all(part in line for line, wanted in zip(told, parts, strict=True) for part in wanted), told
    assert "kept" not in told[2] and "never" not in "".join(told)
    assert gives(lambda case: 2 * case, [1, 2], [2, 4]) and not gives(lambda case: 2 * case, [1, 2], [2, 5])


def test_live_tensors_sees_views_hidden_copies_and_emptied_storages():
    with LiveTensors() as alive:
        hidden = [torch.zeros(1000)]
        assert alive.bytes() == 4000
        view = hidden.pop()[:10]
        assert alive.bytes() == 4000, "ten elements keep the storage of a thousand"
        view.untyped_storage().resize_(0)
        assert alive.bytes() == 0
        torch.empty(10, device="meta")
        assert alive.bytes() == 0
    with LiveTensors(every=True) as alive:
        torch.zeros(1000).sum()
    assert 4000 <= alive.highest < 4100
