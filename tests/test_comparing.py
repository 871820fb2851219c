"""The sentence about a difference: where it is largest, or the known mistake behind it."""

import math

import numpy as np
import pytest

from course_checks.harness import NotYet, close, ratio_hint, returned


def test_close_names_the_largest_difference_and_its_place():
    expected = np.arange(6.0).reshape(2, 3)
    close(expected + 1e-9, expected, rtol=1e-6, atol=1e-8, what="the loss")
    with pytest.raises(NotYet, match=r"^the gradient is off by 0\.25 at \[1, 2\]: yours 5\.25, expected 5$"):
        close(expected + [[0, 0, 0.1], [0, 0, 0.25]], expected, rtol=1e-6, what="the gradient")


@pytest.mark.parametrize(
    ("actual", "expected", "words"),
    [
        (1.5, 1.0, "off by 0.5: yours 1.5, expected 1$"),
        ([1.0, math.nan], [1.0, 2.0], r"at \[1\]: yours nan"),
        ([1.0, math.inf], [1.0, 2.0], r"at \[1\]: yours inf"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], r"shape \(2,\), and should have \(3,\)"),
        ("text", 1.0, "should hold numbers"),
        ([1.0, None], [1.0, 2.0], "should hold numbers"),
        ([[1.0], [1.0, 2.0]], [1.0], "should hold numbers"),
        (object(), 1.0, "should hold numbers"),
        (3, {"w": 1}, "type Mapping"),
        ({"w": 1}, {"w": 1, "b": 2}, "lacks 'b'"),
        ({"w": 1, "c": 2}, {"w": 1}, "has 'c'"),
        ({"w": 1, "b": 4}, {"w": 1, "b": 2}, "the loss of b is off by 2"),
        ({"w": None}, {"w": 1}, "the loss of w should hold numbers, and has 'None'"),
        ({"a": 1.1, "b": 4}, {"a": 1, "b": 2}, "of b is off"),
    ],
)
def test_close_tells_what_is_wrong(actual, expected, words):
    with pytest.raises(NotYet, match=words):
        close(actual, expected, rtol=1e-3, what="the loss")


def test_close_takes_what_is_equal():
    close([math.inf, math.nan], [math.inf, math.nan], rtol=0, what="x")
    close([], [], rtol=0, what="x")
    close({"w": (1, 2)}, {"w": np.array([1, 2])}, rtol=0, what="x")
    close(1.0 + 1e-4, 1, rtol=1e-3, what="x")
    close(1e-9, 0, rtol=1e-3, atol=1e-8, what="x")


@pytest.mark.parametrize("value", [None, ...])
def test_close_of_nothing_asks_for_the_return(value):
    with pytest.raises(NotYet, match="your function returned None; x is missing"):
        close(value, 1.0, rtol=0, what="x")


def test_a_check_that_expects_nonsense_is_our_bug():
    with pytest.raises(ValueError, match="should hold numbers"):
        close(1.0, "text", rtol=0, what="x")


def test_close_takes_tensors_of_every_dtype():
    torch = pytest.importorskip("torch")
    weight = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    close({"w": weight}, {"w": torch.ones(2, 2)}, rtol=0, what="x")
    close([weight.sum(), 1], [4.0, 1], rtol=0, what="x")
    with pytest.raises(NotYet, match=r"x of w is off by 1 at \[0, 0\]"):
        close({"w": weight}, {"w": 2 * torch.ones(2, 2)}, rtol=0, what="x")


TABLE = {4: "you summed where DDP averages", 0.25: "you averaged twice", 0: "nothing arrived", 1: "never said"}


@pytest.mark.parametrize(
    ("factor", "said"), [(4, TABLE[4]), (0.25, TABLE[0.25]), (0, TABLE[0]), (4.0001, TABLE[4]), (1, None), (3.9, None)]
)
def test_a_known_factor_has_its_sentence(factor, said):
    expected = {"w": np.array([[1.0, -2.0]]), "b": np.array([0.5])}
    actual = {name: factor * value for name, value in expected.items()}
    assert ratio_hint(actual, expected, TABLE) == said


def test_no_factor_explains_these():
    assert ratio_hint([4.0, 9.0], [1.0, 2.0], TABLE) is None
    assert ratio_hint([4.0], [1.0, 2.0], TABLE) is None
    assert ratio_hint([0.0], [0.0], TABLE) is None
    assert ratio_hint([math.nan], [1.0], TABLE) is None
    assert ratio_hint({"w": 4.0}, {"w": 1.0, "b": 1.0}, TABLE) is None
    assert ratio_hint(None, 1.0, TABLE) is None
    assert ratio_hint(4.0, 1.0, {}) is None


def test_close_prefers_the_known_mistake():
    with pytest.raises(NotYet, match="^you summed"):
        close([4.0, 8.0], [1.0, 2.0], rtol=1e-5, what="x", ratios=TABLE)
    with pytest.raises(NotYet, match="^x is off"):
        close([4.0, 9.0], [1.0, 2.0], rtol=1e-5, what="x", ratios=TABLE)


def test_returned_checks_the_type_before_a_check_touches_it():
    assert returned(3, (int, float), "x") == 3
    with pytest.raises(NotYet, match="what average returns should be of type int or float, and is list"):
        returned([3], (int, float), "what average returns")
