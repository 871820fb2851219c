"""Which known mistake gives just these numbers? A formula with switches, tried with one switch and then with two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any


def named_mistake(
    yours: Sequence[Any],
    cases: Sequence[Any],
    mistaken: Callable[[Any, tuple[str, ...]], float],
    words: Mapping[str, str],
) -> str | None:
    """The words of the one or two mistakes with which ``mistaken(case, mistakes)`` equals ``yours`` on every case."""
    single = [(name,) for name in words]
    for mistakes in [*single, *combinations(words, 2)]:
        told = [mistaken(case, mistakes) for case in cases]
        try:
            same = all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6) for a, b in zip(yours, told, strict=True))
        except (TypeError, ValueError):  # no number: the comparison before has its words for that
            return None
        if same:
            return "; and it ".join(words[name] for name in mistakes)
    return None
