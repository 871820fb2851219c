"""Lab 1, exercise 6: the largest batch that fits, with few trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness import NotYet, plain, returned
from course_checks.lab01.common import lab
from course_lib.memory import card, estimate

NEVER = 400  # trials after which nobody waits any longer
CASES = [  # (largest batch that fits, largest worth trying)
    (0, 64),
    (1, 64),
    (13, 64),
    (2, 64),
    (3, 64),
    (5, 64),
    (8, 64),
    (63, 64),
    (64, 64),
    (500, 64),
    (1, 1),
    (0, 1),
    (7, 100),
    (99, 100),
    (100, 100),
    (777, 1000),
    (3, 1_000_000),
    (40_000, 1_000_000),
]


class Machine:
    """Answers whether a batch fits, and counts the questions. Raises NotYet for a question that makes no sense."""

    def __init__(self, fitting: Callable[[int], bool], limit: int, story: str) -> None:
        self.fitting, self.limit, self.story = fitting, limit, story
        self.asked: list[int] = []

    def fits(self, batch: int) -> bool:
        batch = plain(batch)
        if not isinstance(batch, int):
            raise NotYet(f"{self.story}: you try a batch of {batch!r}: a batch is a whole number of sequences")
        if batch < 1:
            raise NotYet(f"{self.story}: you try a batch of {batch}: the smallest is 1")
        if batch > self.limit:
            raise NotYet(f"{self.story}: you try {batch}, and {self.limit} is the largest worth trying")
        self.asked.append(batch)
        if len(self.asked) >= NEVER:
            last = ", ".join(map(str, self.asked[-3:]))
            raise NotYet(f"{self.story}: after {NEVER} trials there is no end (… {last}): {_endless(self.asked)}")
        return self.fitting(batch)


def _story(answer: int, limit: int) -> str:
    if answer >= limit:
        return f"all up to the limit of {limit} fit"
    return f"{answer} fit and {answer + 1} do not, limit {limit}" if answer else f"not even 1 fits, limit {limit}"


def _endless(asked: list[int]) -> str:
    if len(set(asked[-20:])) < 3:
        return "when neighbours are left, the middle is one of them: stop when high - low is 1"
    return "double until one does not fit, then halve what lies between"


def budget(answer: int) -> int:
    """Trials that doubling and bisection take: up to the first power of two that is too large, and back between two."""
    return 2 * answer.bit_length() + 2


@lab.exercise("The largest batch that fits", importance=4, difficulty=3, minutes=20)
def largest_micro_batch(search: Callable[..., Any]) -> str:
    """The right answer for eighteen machines, each in about 2 log2 trials; then a real question, to `estimate`."""
    most = 0
    for answer, limit in CASES:
        machine = Machine(lambda batch, answer=answer: batch <= answer, limit, _story(answer, limit))
        mine = returned(search(machine.fits, limit), int, "the largest batch")
        _right(mine, min(answer, limit), machine)
        most = max(most, len(machine.asked))
    t4 = card("t4")
    machine = Machine(
        lambda batch: estimate(
            "smollm2-135m", precision="fp16-mixed", micro_batch_size=batch, seq_len=512, card=t4
        ).fits(t4.memory),
        4096,
        "SmolLM2-135M on a T4",
    )
    real = returned(search(machine.fits, 4096), int, "the largest batch")
    if not (real >= 1 and machine.fitting(real) and not machine.fitting(real + 1)):
        raise NotYet(f"SmolLM2-135M, 512 tokens, on a T4: {real} is not the largest that `estimate` lets fit")
    return (
        f"{len(CASES)} machines with at most {most} trials; a T4 trains SmolLM2-135M on {real} sequences of 512 tokens at a time, "
        f"found in {len(machine.asked)} trials"
    )


def _right(mine: int, truth: int, machine: Machine) -> None:
    trials, story = len(machine.asked), machine.story
    if mine != truth:
        if mine == truth + 1:
            raise NotYet(f"{story}: {mine} is the first that does not fit; give the one before it")
        if mine > truth:
            raise NotYet(f"{story}: you answer {mine}, which does not fit")
        if truth == 1 or mine == 0:
            raise NotYet(f"{story}: you answer {mine}, and {truth} fits")
        if mine == truth - 1:
            why = "where low fits and high does not, stop at high - low == 1, not before"
            raise NotYet(f"{story}: {mine} is one too few: {why}")
        if mine & (mine - 1) == 0:
            why = "now bisect between it and the first that does not"
            raise NotYet(f"{story}: {mine} is the largest power of two that fits: {why}")
        raise NotYet(f"{story}: you answer {mine}, and {truth} fits")
    if trials <= budget(truth):
        return
    enough = f"{budget(truth)} are enough"
    if _in_a_row(machine.asked):
        raise NotYet(f"{story}: {trials} trials, one batch after the other, each a costly run: {enough}")
    twice = trials - len(set(machine.asked))
    if twice:
        raise NotYet(f"{story}: {trials} trials, {twice} of a batch tried before: remember the answers; {enough}")
    if machine.asked[0] > 4 * max(truth, 1):
        why = f"bisecting from the limit pays for the limit; start at 1 and double, {enough}"
        raise NotYet(f"{story}: {trials} trials, the first with {machine.asked[0]}: {why}")
    raise NotYet(f"{story}: {trials} trials, and with doubling and bisection {enough}")


def _in_a_row(asked: list[int]) -> bool:
    return sum(abs(later - earlier) == 1 for earlier, later in zip(asked, asked[1:], strict=False)) > 0.7 * len(asked)
