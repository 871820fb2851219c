"""How a check compares what the learner made with what it should be, and finds a sentence for the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

# fp32 sums over ranks, or in another order, differ by 1e-7 a sum, and are a few hundred sums deep. Adam's division makes
# the most of it.
RTOL, ATOL = 2e-4, 2e-6


class NotYet(Exception):
    """A check's word for a known mistake, one sentence: "your gradients are world_size times too large: …"."""


def returned(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """`value` if it is of `kind`; numbers of NumPy and PyTorch count as Python's, arrays as lists.

    Use it on what the learner's code gives back, before touching it. Raises NotYet for any other type, and for None:
    a forgotten `return` is no untouched stub.
    """
    if value is None or value is ...:
        raise nothing(what)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or {list, tuple, set} & set(kinds):
        value = plain(value)
    if isinstance(value, list) and kinds == (tuple,):
        value = tuple(value)
    if not isinstance(value, kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise NotYet(f"{what} should be of type {names}, and is {type(value).__name__}")
    return value


def nothing(what: str) -> NotYet:
    """The sentence for a function that gave nothing back."""
    return NotYet(f"your function returned None; {what} is missing: is there a `return` on every path?")


def plain(value: Any) -> Any:
    """A number of NumPy or PyTorch as Python's own, an array as a list; inside of lists and tuples, too."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "untyped_storage"):
        return value.item() if value.dim() == 0 else value
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(plain(item) for item in value)
    return value


def number(value: Any, what: str) -> float:
    """`value` as the learner's code gave it, if it is a finite number; NotYet otherwise."""
    value = returned(value, (int, float, Fraction), what)
    if not math.isfinite(value):
        raise NotYet(f"{what} is {value}, and should be a finite number")
    return float(value) if isinstance(value, Fraction) else value


def close(actual: Any, expected: Any, *, rtol: float, atol: float = 0.0, what: str) -> None:
    """Raise NotYet unless |actual - expected| <= atol + rtol * |expected| everywhere.

    Takes numbers, sequences, arrays, tensors of any shape and device, and dicts of them (a state_dict, gradients by
    name). The sentence names the largest difference and where it is. None is NotYet.
    Raises ValueError when `expected` itself does not hold numbers.
    """
    worst: tuple[float, str] = (0.0, "")
    for label, yours, wanted in _pairs(actual, expected, what):
        excess, sentence = _difference(label, yours, wanted, rtol, atol)
        if excess > worst[0]:
            worst = excess, sentence
    if worst[1]:
        raise NotYet(worst[1])


def same(one: Any, other: Any) -> bool:
    """True for tensors of equal shape, equal within RTOL and ATOL; for dicts of them, on every key of `other`."""
    if isinstance(other, Mapping):
        return all(same(one[key], other[key]) for key in other)
    return bool(one.shape == other.shape and one.allclose(other, rtol=RTOL, atol=ATOL))


def in_bytes(count: float) -> str:
    return f"{count:,.0f} bytes"


def _pairs(actual: Any, expected: Any, what: str) -> list[tuple[str, Any, Any]]:
    """(label, yours, wanted) as float64 arrays: one triple, or one for each key of `expected`."""
    if actual is None or actual is ...:
        raise nothing(what)
    if not isinstance(expected, Mapping):
        return [(what, _yours(actual, what), _array(expected, what))]
    names = returned(actual, Mapping, what)
    missing, extra = [k for k in expected if k not in names], [k for k in names if k not in expected]
    if missing or extra:
        raise NotYet(f"{what} lacks {missing[0]!r}" if missing else f"{what} has {extra[0]!r}, which does not belong")
    labels = {key: f"{what} of {key}" for key in expected}
    return [(label, _yours(names[key], label), _array(expected[key], label)) for key, label in labels.items()]


def _yours(value: Any, what: str) -> Any:
    try:
        return _array(value, what)
    except ValueError as error:
        raise NotYet(str(error)) from error


def _array(value: Any, what: str) -> Any:
    """A float64 numpy array of numbers, sequences, and tensors of any dtype and device; ValueError for the rest."""
    import numpy as np

    if hasattr(value, "detach"):
        return value.detach().cpu().double().numpy()  # bfloat16 has no numpy twin
    if isinstance(value, (list, tuple)) and any(item is None or hasattr(item, "detach") for item in value):
        value = [_array(item, what) for item in value]
    try:
        if value is None or isinstance(value, (str, bytes)):
            raise TypeError("no number")
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what} should hold numbers, and has {str(value)[:80]!r}") from error


def _difference(label: str, yours: Any, wanted: Any, rtol: float, atol: float) -> tuple[float, str]:
    """How far the worst element is beyond its tolerance (0: none is), and the sentence about it."""
    import numpy as np

    if yours.shape != wanted.shape:
        return np.inf, f"{label} has the shape {yours.shape}, and should have {wanted.shape}"
    same = (yours == wanted) | (np.isnan(yours) & np.isnan(wanted))
    with np.errstate(invalid="ignore", over="ignore"):
        excess = np.where(same, 0.0, np.abs(yours - wanted) - (atol + rtol * np.abs(wanted)))
    excess = np.where(np.isnan(excess), np.inf, excess)
    if excess.size == 0 or excess.max() <= 0:
        return 0.0, ""
    at = np.unravel_index(int(excess.argmax()), excess.shape)
    here = f" at [{', '.join(str(int(i)) for i in at)}]" if at else ""
    apart = abs(float(yours[at]) - float(wanted[at]))
    return float(excess[at]), f"{label} is off by {apart:.3g}{here}: yours {yours[at]:.6g}, expected {wanted[at]:.6g}"
