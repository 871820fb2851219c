"""Which known mistake gives just these numbers? A formula with switches, tried with one switch on, then with two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any


def explains(
    yours: Sequence[Any],
    mistaken: Callable[[Any, frozenset[str]], Any],
    cases: Sequence[Any],
    mistakes: Iterable[str],
    *,
    together: int = 2,
    rtol: float = 1e-9,
    atol: float = 1e-9,
) -> tuple[str, ...] | None:
    """The mistakes, as few as possible, with which `mistaken(case, mistakes)` is your answer to every case; or None."""
    names = tuple(mistakes)
    for size in range(1, together + 1):
        for made in combinations(names, size):
            if all(
                _same(mine, mistaken(case, frozenset(made)), rtol, atol)
                for mine, case in zip(yours, cases, strict=True)
            ):
                return made
    return None


def _same(mine: Any, wrong: Any, rtol: float, atol: float) -> bool:
    try:
        return math.isclose(mine, wrong, rel_tol=rtol, abs_tol=atol)
    except (TypeError, ValueError):  # no numbers: compare them as they are
        return bool(mine == wrong)


def named_mistake(
    yours: Sequence[Any],
    mistaken: Callable[[Any, frozenset[str]], Any],
    cases: Sequence[Any],
    sentences: Mapping[str, str],
    *,
    join: str = "; and ",
    **settings: Any,
) -> str | None:
    """The sentences of those mistakes in one, or None."""
    made = explains(yours, mistaken, cases, sentences, **settings)
    return join.join(sentences[name] for name in made) if made else None
