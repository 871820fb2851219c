"""How a check compares what the learner made with what it should be, and finds a sentence for the difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NotYet(Exception):
    """A check's word for a known mistake, one sentence: "your gradients are world_size times too large: …"."""


class NotAttempted(Exception):
    """Raised by a check that meets an untouched stub."""


def returned(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """`value` if it is of `kind`. Raises NotAttempted for None and Ellipsis, NotYet for any other type.

    Use it on what the learner's code gives back, before touching it: an exception from using a wrong type would come
    from the check's own line, and so count as the course's bug.
    """
    if value is None or value is ...:
        raise NotAttempted
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise NotYet(f"{what} should be of type {names}, and is {type(value).__name__}")
    return value


def close(
    actual: Any, expected: Any, *, rtol: float, atol: float = 0.0, what: str, ratios: Mapping[float, str] | None = None
) -> None:
    """Raise NotYet unless |actual - expected| <= atol + rtol * |expected| everywhere.

    Takes numbers, sequences, arrays, tensors of any shape and device, and dicts of them (a state_dict, gradients by
    name). The sentence names the largest difference and where it is, or is `ratio_hint`'s when `ratios` knows one.
    None and Ellipsis are NotAttempted. Raises ValueError when `expected` itself does not hold numbers.
    """
    worst: tuple[float, str] = (0.0, "")
    for label, yours, wanted in _pairs(actual, expected, what):
        excess, sentence = _difference(label, yours, wanted, rtol, atol)
        if excess > worst[0]:
            worst = excess, sentence
    if worst[1]:
        raise NotYet((ratio_hint(actual, expected, ratios) if ratios else None) or worst[1])


def ratio_hint(actual: Any, expected: Any, table: Mapping[float, str], *, rtol: float = 1e-3) -> str | None:
    """The sentence of the factor k in `table` with actual = k * expected, or None.

    {world_size: "your gradients are exactly world_size times too large: you summed where DDP averages"}. Everywhere
    means within `rtol` of the largest element. Factor 1 (one rank) never matches; takes what `close` takes.
    """
    import numpy as np

    try:
        pairs = [(yours, wanted) for _, yours, wanted in _pairs(actual, expected, "")]
    except (NotYet, NotAttempted):
        return None
    if any(yours.shape != wanted.shape for yours, wanted in pairs):
        return None
    yours = np.concatenate([np.zeros(0), *(pair[0].ravel() for pair in pairs)])
    wanted = np.concatenate([np.zeros(0), *(pair[1].ravel() for pair in pairs)])
    scale = float(np.abs(wanted).max(initial=0.0))
    if scale == 0 or not np.isfinite(scale) or not np.isfinite(yours).all():
        return None
    errors = {k: float(np.abs(yours - k * wanted).max()) / (scale * max(abs(k), 1e-3)) for k in table if k != 1}
    best = min(errors, key=errors.__getitem__, default=None)
    return table[best] if best is not None and errors[best] <= rtol else None


def _pairs(actual: Any, expected: Any, what: str) -> list[tuple[str, Any, Any]]:
    """(label, yours, wanted) as float64 arrays: one triple, or one for each key of `expected`."""
    if actual is None or actual is ...:
        raise NotAttempted
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
