"""Every exercise of every lab answers a wrong kind of function with a sentence: never with an exception of the course's."""

import functools
import importlib
from pathlib import Path

import pytest

import course_checks
from course_checks.harness import ranks
from course_lib.launch import launch

LABS = sorted(path.name for path in Path(course_checks.__file__).parent.glob("lab[0-9]*"))


@functools.cache
def lab_of(name):
    return importlib.import_module(f"course_checks.{name}").lab


EXERCISES = [(name, exercise) for name in LABS for exercise in lab_of(name).exercises]


def no_parameters():
    return 1


def too_many(a, b, c, d, e, f, g, h, i, j, k, *, m):
    return 1


def forgot_the_return(*args, **kwargs):
    len(args)


def a_text(*args, **kwargs):
    return "text"


def an_object(*args, **kwargs):
    return object()


def raises(*args, **kwargs):
    return args[0].no_such_thing + undefined_name  # noqa: F821


KINDS = (no_parameters, forgot_the_return, a_text, an_object, too_many, raises)
ON_RANKS = (
    no_parameters,
    forgot_the_return,
    an_object,
)  # what the others come to in a rank is the same code's doing; a launch takes its time


@pytest.fixture(scope="module", autouse=True)
def warm_ranks():
    launch(float, ranks=1, quiet=True)


@pytest.mark.parametrize(("lab", "exercise"), EXERCISES)
def test_a_wrong_kind_of_function_gets_a_sentence(lab, exercise, monkeypatch):
    launches = []

    def counted(*args, **kwargs):
        launches.append(args)
        return launch(*args, **kwargs)

    monkeypatch.setattr(ranks, "launch", counted)
    check = getattr(lab_of(lab), exercise)
    count = len(check.__wrapped__.__code__.co_varnames[: check.__wrapped__.__code__.co_argcount])
    for kind in KINDS:
        if launches and kind not in ON_RANKS:
            continue
        verdict = check(*[kind] * count)
        assert verdict.status == "not yet", (kind.__name__, verdict)
        assert "Traceback" not in verdict.message
        if kind is no_parameters and "no_parameters() takes 0" in verdict.message:
            assert "keep the arguments that the stub has" in verdict.message
