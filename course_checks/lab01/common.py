"""What the checks of lab 1 share: the lab itself, numbers that learners hand in, and finding the slips in them."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_checks.harness.checking import Lab, NotYet, returned

lab = Lab("01_gpu_memory", title="Will it fit?")

Slips = frozenset[str]
NO_SLIP: Slips = frozenset()


def number(value: Any, what: str) -> float:
    """`value` as the learner's code gave it, if it is a finite number. Raises NotAttempted or NotYet."""
    if not isinstance(value, numbers.Real):  # NumPy's numbers are real, too
        returned(value, (int, float), what)
    if not math.isfinite(value):
        raise NotYet(f"{what} is {value}, and should be a number of bytes")
    return value


def far(yours: Sequence[float], truth: Sequence[float], *, rtol: float = 0.0, atol: float = 0.0) -> list[int]:
    """Where the two differ by more than the tolerance."""
    pairs = enumerate(zip(yours, truth, strict=True))
    return [i for i, (mine, wanted) in pairs if not math.isclose(mine, wanted, rel_tol=rtol, abs_tol=atol)]


def slip(
    yours: Sequence[float],
    worked_out: Callable[[Any, Slips], float],
    cases: Sequence[Any],
    sentences: Mapping[str, str],
    *,
    rtol: float = 1e-9,
    together: int = 2,
) -> str | None:
    """The sentence of the known mistake, or of the few together, that gives exactly these answers; None if none does.

    `worked_out(case, slips)` is the answer of somebody who makes these mistakes. Fewer mistakes are tried first.
    """
    for size in range(1, together + 1):
        for made in itertools.combinations(sentences, size):
            told = frozenset(made)
            if not far(yours, [worked_out(case, told) for case in cases], rtol=rtol):
                return "; and ".join(sentences[name] for name in made)
    return None


def factor(yours: Sequence[float], truth: Sequence[float], sentences: Mapping[float, str]) -> str | None:
    """The sentence of the factor by which every answer is off, or None."""
    for times, sentence in sentences.items():
        if not far(yours, [times * wanted for wanted in truth], rtol=1e-6):
            return sentence
    return None


def gib(num_bytes: float) -> str:
    """Bytes for a sentence: '18.9 GiB', '350 MiB' or '4,096 bytes'."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes:,.0f} bytes"
