"""What comes out of a check: one of three words, the learner's own line, and never the course's own bug as theirs."""

import linecache
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import course_checks
from course_checks.harness.checking import Lab, NotYet, Verdict, close, returned
from course_checks.harness.ranks import sent_between
from course_checks.harness.values import fresh, named_seed
from course_lib.launch import RankFailed, RanksHung
from course_lib.notebook import progress
from course_lib.observe import Collective

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


def cell(source: str, number: int = 7) -> dict:
    """Run `source` as a notebook cell whose lines a traceback can show."""
    name = f"<cell {number}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    return names


def failed(kind: str, message: str = "", where: str = "", rank: int = 1) -> RankFailed:
    return RankFailed("a long report", rank, kind, message, where)


def raises(error: BaseException) -> Callable:
    def check_body(make):
        raise error

    return check_body


# -------------------------------------------------------------------------------- the three words
def test_passed_with_its_evidence(capsys):
    verdict = a_lab("make(); return '2 ranks; 5.6 MB a rank a step'").double(lambda: print(end=""))
    assert capsys.readouterr().out == "passed: 2 ranks; 5.6 MB a rank a step\n"
    assert isinstance(verdict, Verdict) and verdict.status == "passed" and verdict.exercise == "double"
    assert verdict.seconds >= 0


def test_passed_without_evidence(capsys):
    assert a_lab("make()").double(lambda: print(end="")).message == ""
    assert capsys.readouterr().out == "passed\n"


@pytest.mark.parametrize(
    "stub",
    [
        "def f():\n    raise NotImplementedError  # your code here",
        "def f():\n    '''Doc.'''\n    raise NotImplementedError('later')",
        "def f():\n    x = 3\n    raise NotImplementedError",
        "def f():\n    ...",
        "def f():\n    '''Doc.'''",
        "def f():\n    pass",
        "def f():\n    return None",
        "def f(a, b=2):\n    '''Doc.'''\n    return ...",
        "class f:\n    def __init__(self):\n        raise NotImplementedError",
        "class f:\n    def __init__(self, model):\n        ...\n\n    def forward(self, x): ...",
        "f = ...",
    ],
)
def test_an_untouched_stub_is_not_attempted(capsys, stub):
    lab = a_lab("returned(make(), int, 'what double returns'); return 'fine'")
    assert lab.double(cell(stub)["f"]).status == "not attempted"
    assert capsys.readouterr().out == "not attempted\n"
    assert progress.load().labs == {}  # opening a lab is not a try


@pytest.mark.parametrize("value", [None, ...])
def test_a_forgotten_return_is_an_attempt(value):
    verdict = a_lab("returned(make(), int, 'what double returns'); return 'fine'").double(lambda: [value][0])
    assert verdict.status == "not yet"
    assert verdict.message.startswith("your function returned None; what double returns is missing")


@pytest.mark.parametrize(
    "working",
    [
        "def f():\n    return 4",
        "def f():\n    return ''",
        "def f(x=1):\n    return x",
        "f = max",
        "def f():\n    yield",
    ],
)
def test_a_short_answer_is_an_attempt(working):
    assert a_lab("return 'seen'").double(cell(working)["f"]).status == "passed"


def test_not_yet_says_the_checks_sentence(capsys):
    verdict = a_lab("raise NotYet('you summed where DDP averages')").double(print)
    assert capsys.readouterr().out == "not yet: you summed where DDP averages\n"
    assert (verdict.status, verdict.message) == ("not yet", "you summed where DDP averages")


# -------------------------------------------------------------------------------- the learner's mistakes
def test_the_learners_exception_names_the_learners_line(capsys):
    f = cell("def f():\n    return inner()\n\ndef inner():\n    return 1 / 0\n")["f"]
    assert a_lab().double(f).status == "not yet"
    assert capsys.readouterr().out == (
        "not yet: your code raised ZeroDivisionError: division by zero at your cell, line 5: `return 1 / 0`\n"
    )


def test_an_exception_deep_in_a_library_names_the_learners_line():
    f = cell("import json\ndef f():\n    return json.loads('{')\n")["f"]
    message = a_lab().double(f).message
    assert message.startswith("your code raised JSONDecodeError: ") and "line 3: `return json.loads('{')`" in message


def test_course_code_called_by_the_learner_is_still_the_learners_line():
    f = cell("from course_lib.notebook.ledger import predict\ndef f():\n    predict('x', 1, 'G')\n")["f"]
    message = a_lab().double(f).message
    assert "ValueError" in message and "line 3: `predict('x', 1, 'G')`" in message


def test_a_notimplementederror_of_a_library_is_not_a_stub():
    torch_says = course_code("def kernel():\n    raise NotImplementedError('no kernel for Half')")["kernel"]
    lab, f = a_lab(), cell("def f():\n    return kernel()")
    f["kernel"] = torch_says
    verdict = lab.double(f["f"])
    assert verdict.status == "not yet" and "no kernel for Half" in verdict.message and "line 2" in verdict.message


def test_the_learners_own_assertion_is_the_learners():
    f = cell("def f():\n    assert 1 > 2, 'my own check'")["f"]
    assert "AssertionError: my own check at your cell, line 2" in a_lab().double(f).message


def test_sys_exit_does_not_end_the_notebook():
    f = cell("import sys\ndef f():\n    sys.exit(3)")["f"]
    assert "SystemExit: 3" in a_lab().double(f).message


def test_an_exception_that_cannot_be_printed():
    f = cell("class Odd(Exception):\n    def __str__(self):\n        return 1 / 0\ndef f():\n    raise Odd")["f"]
    assert "Odd: (its message cannot be shown: ZeroDivisionError)" in a_lab().double(f).message


def test_a_long_message_is_cut_to_one_line():
    f = cell("def f():\n    raise ValueError('a\\n' * 5000)")["f"]
    verdict = a_lab().double(f)
    assert "\n" not in verdict.message and len(verdict.message) < 500 and "…" in verdict.message


def test_a_keyboard_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt):
        a_lab().double(cell("def f():\n    raise KeyboardInterrupt")["f"])


@pytest.mark.parametrize("arguments", [(), (len, len), (3,), (None,), ("text",), ([len],)])
def test_a_result_in_the_place_of_the_function(capsys, arguments):
    verdict = a_lab().double(*arguments)
    assert verdict.status == "not yet"
    assert capsys.readouterr().out == "not yet: pass the function itself, not its result: check.double(make)\n"


def test_an_unknown_keyword_is_a_wrong_call_too():
    assert a_lab().double(mak=len).message.startswith("pass the function itself")


def test_a_parameter_annotated_as_a_value_takes_a_value():
    lab = a_lab("return f'{answer}'", head="def double(answer: float):")
    assert lab.double(3).message == "3"
    assert lab.double(None).status == lab.double(...).status == "not attempted"
    lab = a_lab("return 'ok'", head="def double(f: Callable[[int], int]):", Callable=Callable)
    assert lab.double(3).message.startswith("pass the function itself")


# -------------------------------------------------------------------------------- the ranks
WHERE = "cell [7], line 3: `x = y / 0`"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            failed("NotImplementedError", "", "cell [7], line 2: `raise NotImplementedError  # your code here`"),
            "not attempted",
            "",
        ),
        (failed("NotImplementedError", "", ""), "not attempted", ""),
        (
            failed("NotImplementedError", "later", "cell [7], line 2: `raise NotImplementedError('later')`"),
            "not attempted",
            "",
        ),
        (
            failed("NotImplementedError", "no kernel for Half", "cell [7], line 2: `x @ y`"),
            "not yet",
            "your code raised NotImplementedError: no kernel for Half on rank 1 at cell [7], line 2: `x @ y`",
        ),
        (failed("NotYet", "rank 1 never sent its shard"), "not yet", "rank 1 never sent its shard"),
        (
            failed("ZeroDivisionError", "division by zero", WHERE),
            "not yet",
            f"your code raised ZeroDivisionError: division by zero on rank 1 at {WHERE}",
        ),
        (failed("AssertionError", "", WHERE), "not yet", f"your code raised AssertionError on rank 1 at {WHERE}"),
        (
            failed("NotImplementedError", 'Module [My] is missing the required "forward" function'),
            "not yet",
            'Module [My] is missing the required "forward" function',
        ),
        (failed("SystemExit", "rank 1 ended itself with code 3"), "not yet", "rank 1 ended itself with code 3"),
        (failed("SystemExit", "3", WHERE), "not yet", f"your code raised SystemExit: 3 on rank 1 at {WHERE}"),
        (failed("SIGKILL", "rank 1 was ended by SIGKILL"), "not yet", "rank 1 was ended by SIGKILL"),
        (
            RanksHung("ranks 0, 2 wait in all_reduce (your cell, line 7)"),
            "not yet",
            "ranks 0, 2 wait in all_reduce (your cell, line 7)",
        ),
        (
            TypeError("make cannot travel to the ranks (cannot pickle '_thread.lock' object)."),
            "not yet",
            "make cannot travel to the ranks (cannot pickle '_thread.lock' object).",
        ),
    ],
    ids=lambda value: str(getattr(value, "cause_type", ""))[:20],
)
def test_what_a_launch_raises(error, status, message):
    verdict = a_lab("raise error", error=error).double(print)
    assert (verdict.status, verdict.message) == (status, message)


def test_real_ranks_from_a_real_launch():
    """The launcher's exceptions as they are, not as this file builds them."""
    body = "from course_lib.launch import launch; launch(make, ranks=1, quiet=True, timeout=60); return 'fine'"
    lab = a_lab(body)
    assert (
        lab.double(cell("def f():\n    raise NotImplementedError  # your code here\n")["f"]).status == "not attempted"
    )
    message = lab.double(cell("def f():\n    return 1 / 0\n")["f"]).message
    assert message.startswith("your code raised ZeroDivisionError: division by zero on rank 0 at your cell, line 2")
    assert lab.double(cell("def f():\n    return 3\n")["f"]).status == "passed"
    stop = cell("from course_checks.harness.checking import NotYet\ndef f():\n    raise NotYet('said in a rank')\n")[
        "f"
    ]
    assert str(lab.double(stop)) == "not yet: said in a rank"
    lock = cell("import threading\nlock = threading.Lock()\ndef f():\n    return lock\n")["f"]
    assert "cannot travel" in str(lab.double(lock))


# -------------------------------------------------------------------------------- the course's own bugs
@pytest.mark.parametrize("body", ["assert make() == 5, 'ours'", "undefined_name", "return 4"])
def test_a_bug_in_a_check_raises_and_blames_nobody(capsys, body):
    lab = a_lab(body)
    with pytest.raises((AssertionError, NameError)):
        lab.double(cell("def f():\n    return 2 + 2")["f"])
    assert capsys.readouterr().out == "" and lab.verdicts == {} and progress.load().labs == {}


def test_an_assertion_of_ours_behind_the_learners_code_is_ours():
    spy = course_code("def spy():\n    assert False, 'ours'")["spy"]
    f = cell("def f():\n    spy()")
    f["spy"] = spy
    with pytest.raises(AssertionError, match="ours"):
        a_lab().double(f["f"])


@pytest.mark.parametrize("kind", ["AssertionError", "NameError", "unknown"])
def test_a_rank_that_failed_without_a_line_of_the_learners_is_ours(kind):
    with pytest.raises(RankFailed):
        a_lab("raise error", error=failed(kind, "boom")).double(print)


# -------------------------------------------------------------------------------- the guard
@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    return 4",
        "def f(a, b):\n    return a",
        "class f:\n    def __init__(self, a, b):\n        self.a = a",
    ],
)
def test_other_arguments_than_the_stubs_are_a_sentence(source):
    verdict = a_lab("make(3); return 'fine'").double(cell(source)["f"])
    assert verdict.status == "not yet"
    assert verdict.message.startswith("keep the arguments that the stub has: f")


@pytest.mark.parametrize("body", ["make().shape", "1 / (make() - 4)", "make()[0]", "{}[make()]", "int('x' * make())"])
def test_what_cannot_be_used_is_a_sentence(body):
    message = a_lab(f"{body}; return 'fine'").double(cell("def f():\n    return 2 + 2")["f"]).message
    assert message.startswith("the check cannot use what your function gave (") and "docstring" in message


def test_what_cannot_be_used_on_a_rank_is_a_sentence():
    lab = a_lab("raise error", error=failed("AttributeError", "'int' object has no attribute 'step'"))
    assert "cannot use what your function gave" in lab.double(print).message


@pytest.mark.parametrize(
    "loop",
    ["while True:\n        pass", "while True:\n        try:\n            x = 1\n        except:\n            pass"],
)
def test_an_endless_loop_is_stopped_and_named(loop):
    lab = a_lab()
    lab.limit = 0.3
    message = lab.double(cell(f"def f():\n    {loop}\n")["f"]).message
    assert message.startswith("stopped after 0.3 s: your code was still running, at your cell, line")


def test_an_exercise_may_take_longer_than_its_lab_allows():
    lab = a_lab("import time; time.sleep(0.4); return 'fine'")
    lab.limit, lab.exercises["double"].limit = 0.1, 30.0
    assert lab.double(print).status == "passed"


@pytest.mark.parametrize(
    "change", ["x.pop()", "x.clear()", "x.sort()", "x[1].append(3)", "x[2].mul_(2)", "x[2].data.add_(1)"]
)
def test_inputs_that_are_changed_are_a_sentence(change):
    import torch

    lab = a_lab("make(given); return 'fine'", given=[7, [1], torch.ones(3)])
    source = "def f(x):\n    " + (change if change != "x.sort()" else "x.reverse()")
    message = lab.double(cell(source)["f"]).message
    assert message.startswith("f changes argument 1, the list that it was given")
    if "x[2]" not in change:  # lists are handed over as copies
        assert lab.double(cell("def f(x):\n    assert x[:2] == [7, [1]]")["f"]).status == "passed"
    lab = a_lab("make(given); return 'fine'", given=[7, [1], torch.ones(3)])
    lab.exercises["double"].keeps_inputs = False
    assert lab.double(cell(source)["f"]).status == "passed"


def test_numbers_of_numpy_and_torch_are_numbers():
    import numpy
    import torch

    for value in (numpy.int64(4), torch.tensor(4), numpy.array(4)):
        assert returned(value, int, "x") == 4 and type(returned(value, int, "x")) is int
    assert returned([numpy.int64(4), (torch.tensor(2),)], list, "x") == [4, (2,)]
    assert returned(numpy.array([1, 2]), (list, tuple), "x") == [1, 2]
    assert returned(numpy.array([1, 2]), tuple, "x") == (1, 2)
    with pytest.raises(NotYet, match="of type int, and is float"):
        returned(numpy.float64(4.5), int, "x")


def test_what_was_sent_has_a_lower_bound_and_an_upper_one():
    calls = [
        Collective(rank=0, kind=kind, bytes=size, seconds=None, start=0.0, group=(0, 1))
        for kind, size in (
            ("barrier", 0),
            ("all_reduce", 600),
            ("send", 400),
            ("recv", 900),
            ("barrier", 0),
            ("send", 50),
        )
    ]
    run = SimpleNamespace(collectives=calls)
    assert sent_between(run, 0, 1000, 1000, "gradients", phase=1) == 1000
    assert sent_between(run, 0, 0, 2000, "gradients") == 1050
    assert sent_between(run, 0, 600, 600, "gradients", kinds=["all_reduce"]) == 600
    with pytest.raises(NotYet, match="rank 0 sends 1,000 bytes of gradients, and 900 are enough: send each one once"):
        sent_between(run, 0, 0, 900, "gradients", phase=1, why="send each one once")
    with pytest.raises(NotYet, match="rank 1 sends 0 bytes of gradients, and it takes at least 10"):
        sent_between(run, 1, 10, 20, "gradients", kinds=["send"])


def test_fresh_values_are_other_ones_on_each_rank_and_the_same_for_a_seed():
    one, other = fresh((50,), 3), fresh((50,), 3, rank=1)
    assert one.equal(fresh((50,), 3)) and not one.equal(other) and not one.equal(fresh((50,), 4))
    assert not (one == one.round()).any() and (one.abs() >= 0.5).all()
    with pytest.raises(NotYet, match="it is off .values of seed 3."), named_seed(3):
        raise NotYet("it is off")
