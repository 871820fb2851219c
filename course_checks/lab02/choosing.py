"""Lab 2, exercise 8: which blocks to checkpoint, so that the step fits with the least work done twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_checks.harness import NotYet, returned
from course_checks.lab02.common import lab
from course_lib.units import MIB


@dataclass(frozen=True)
class Case:
    """Bytes of each block's input, bytes it keeps besides, seconds of its forward, and the budget in bytes."""

    input_bytes: tuple[int, ...]
    inner_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    budget: int

    def __str__(self) -> str:
        inputs, inner = ([b // MIB for b in some] for some in (self.input_bytes, self.inner_bytes))
        return f"inputs {inputs} MiB, inner {inner} MiB, seconds {list(self.seconds)}, budget {self.budget // MIB} MiB"


def _case(inputs: list[int], inner: list[int], seconds: list[float], budget: int) -> Case:
    return Case(tuple(i * MIB for i in inputs), tuple(i * MIB for i in inner), tuple(seconds), budget * MIB)


CASES = (
    _case([4] * 4, [36] * 4, [1.0] * 4, 160),  # all fits
    _case([4] * 4, [36] * 4, [1.0] * 4, 130),  # one of them; the last would bring nothing
    _case([2] * 5, [10, 20, 30, 40, 50], [5.0, 1.0, 4.0, 2.0, 0.5], 130),
    _case([1, 2, 1, 2, 1, 2], [20, 64, 20, 64, 20, 64], [1.0, 2.0, 1.5, 3.0, 1.2, 2.5], 110),
    _case([3, 3, 3, 3], [40, 12, 90, 12], [2.0, 1.0, 3.0, 1.0], 112),  # block 2 alone is nearly too large
    _case([2] * 6, [30, 30, 44, 16, 16, 30], [3.0, 3.0, 4.0, 1.7, 1.7, 0.1], 118),  # cheapest per byte is not the best
    _case([4] * 10, [36, 36, 36, 36, 36, 60, 36, 36, 36, 36], [1.0] * 5 + [1.5] + [1.0] * 4, 150),
    _case([4] * 4, [36] * 4, [1.0] * 4, 50),  # every input and one recomputed block: too much
)


def moments(case: Case, chosen: frozenset[int]) -> tuple[int, int, int]:
    """(peak, block at whose backward it is, bytes at the end of forward)."""
    held, peak, at = 0, 0, 0
    for i, (given, inner) in enumerate(zip(case.input_bytes, case.inner_bytes, strict=True)):
        held += given + (0 if i in chosen else inner)
        during = held + (inner if i in chosen else 0)  # its backward: it is recomputed, later blocks are gone
        if during > peak:
            peak, at = during, i
    return peak, at, held


def least_seconds(case: Case) -> tuple[float, frozenset[int]] | None:
    """The best choice, found by trying all; None when no choice fits."""
    blocks = range(len(case.seconds))
    every = (frozenset(some) for size in range(len(blocks) + 1) for some in itertools.combinations(blocks, size))
    fitting = [(sum(case.seconds[i] for i in some), some) for some in every if moments(case, some)[0] <= case.budget]
    return min(fitting, key=lambda pair: (pair[0], sorted(pair[1])), default=None)


@lab.exercise("Which blocks to checkpoint", importance=3, difficulty=3, minutes=20)
def choose_checkpointing(choose: Callable[..., Any]) -> str:
    """Fits at every moment of the backward pass, with the fewest seconds of recomputation; refuses what cannot fit."""
    for case in CASES:
        best = least_seconds(case)
        try:
            answer = choose(list(case.input_bytes), list(case.inner_bytes), list(case.seconds), case.budget)
        except ValueError:
            if best is not None:
                raise NotYet(f"{case}: you refuse, and {sorted(best[1])} fits") from None
            continue
        chosen = _as_blocks(answer, case)
        if best is None:
            raise NotYet(f"{case}: no choice fits, and you give {sorted(chosen)}; raise ValueError")
        _right_choice(case, chosen, best)
    return f"{len(CASES) - 1} models with the least recomputation that fits, and one refused"


def _as_blocks(answer: Any, case: Case) -> frozenset[int]:
    answer = returned(answer, (set, frozenset, list, tuple), "the choice")
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < len(case.seconds) for i in answer):
        raise NotYet(f"{case}: give the indices of the blocks to checkpoint, not {answer}")
    return frozenset(answer)


def _right_choice(case: Case, chosen: frozenset[int], best: tuple[float, frozenset[int]]) -> None:
    peak, at, end = moments(case, chosen)
    mine = sorted(chosen)
    if peak > case.budget:
        if end <= case.budget:
            raise NotYet(
                f"{case}: {mine} fits at the end of forward ({end // MIB} MiB) and not later: in its own backward block {at} "
                f"is there in full again, {peak // MIB} MiB in all"
            )
        raise NotYet(f"{case}: with {mine} the peak is {peak // MIB} MiB, at the end of forward")
    seconds = sum(case.seconds[i] for i in chosen)
    if seconds <= best[0] + 1e-9:
        return
    story = f"{case}: {mine} fits with {seconds:g} s done twice, and {sorted(best[1])} with {best[0]:g} s"
    last = len(case.seconds) - 1
    if len(chosen) == len(case.seconds):
        raise NotYet(f"{story}: checkpoint only as many as it takes")
    if last in chosen and moments(case, chosen - {last})[0] <= case.budget:
        raise NotYet(f"{story}: the last block is recomputed before anything is freed, so it brings nothing")
    raise NotYet(f"{story}: try every choice, a greedy one misses the best")
