"""Check the arguments of public functions; each refusal is one sentence that says what to give instead."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any


def positive(**numbers: Any) -> None:
    """Check that each argument is a finite number above 0. Raises ValueError."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: give a number above 0.")


def check_counts(**counts: Any) -> None:
    """Check that each argument is a whole number of at least 1; numpy's integers count. Raises ValueError."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number of at least 1.")


def pick(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that `value` is one of `choices`. Raises ValueError, which offers the nearest one."""
    if value not in choices:
        near = did_you_mean(value, choices)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(map(str, choices))}."
        raise ValueError(f"{name}={value!r} is not known here: {hint}")


def did_you_mean(word: Any, known: Iterable[Any], *, most: int = 1, cutoff: float = 0.5) -> list[str]:
    """The names among `known` that look most like `word`, best first: those that begin with it, else the
    closest. Upper and lower case, - and _ count as equal.

    Args:
        word: what somebody wrote.
        known: the names that exist.
        most: how many to offer at most.
        cutoff: how alike they must be, 0 to 1, as in `difflib.get_close_matches`.
    """
    plain = {str(name).lower().replace("-", "_"): str(name) for name in known}
    word = str(word).lower().replace("-", "_")
    started = [name for name in plain if word and name.startswith(word)][:most]  # "fp16" is "fp16-mixed", not "bf16"
    return [plain[name] for name in started or difflib.get_close_matches(word, plain, most, cutoff)]
