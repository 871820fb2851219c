"""What every closed form asks of its numbers, in one sentence each."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any


def positive(**numbers: Any) -> None:
    """Raises ValueError for what is no finite number above 0."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: give a number above 0.")


def check_counts(**counts: Any) -> None:
    """Raises ValueError where one is no whole number of at least 1."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number of at least 1.")


def pick(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ValueError for a value that is none of `choices`; the nearest one is offered."""
    if value not in choices:
        near = difflib.get_close_matches(str(value).lower(), [str(choice) for choice in choices], 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(map(str, choices))}."
        raise ValueError(f"{name}={value!r} is no choice: {hint}")
