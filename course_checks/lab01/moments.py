"""Lab 1, exercise 5: the peak of a step is the largest of its moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from course_checks.harness import NotYet, named_mistake, number, returned
from course_checks.lab01.common import NO_SLIP, Slips, lab


class Case(NamedTuple):
    """A step: bytes by layer, in the order of the forward pass."""

    resident: int
    kept: list[int]
    forward: list[int]
    backward: list[int]
    gradients: list[int]
    step: int


CASES = [
    Case(100, [10, 10, 10], [5, 5, 5], [8, 8, 8], [1, 1, 1], 2),  # much kept: backward of the last layer
    Case(100, [10, 10, 10], [5, 5, 40], [8, 8, 30], [1, 1, 1], 2),  # forward of the last layer
    Case(100, [2, 2, 2, 2], [1, 1, 1, 1], [2, 2, 2, 2], [20, 20, 20, 20], 0),  # backward of the first
    Case(100, [2, 2, 2, 2], [1, 1, 1, 1], [2, 2, 2, 2], [20, 20, 20, 20], 70),  # the optimizer
    Case(60, [5, 30, 5, 5], [0, 70, 0, 0], [0, 40, 0, 5], [10, 5, 10, 30], 20),  # one wide layer in the middle
    Case(60, [5, 30, 5, 5], [0, 20, 0, 0], [0, 80, 0, 5], [10, 5, 10, 30], 20),
    Case(0, [7], [3], [9], [4], 1),
    Case(300, [0, 4, 4, 4, 4, 12], [0, 9, 9, 9, 9, 24], [0, 12, 12, 12, 12, 36], [40, 6, 6, 6, 6, 40], 104),
    Case(10, [4, 6], [9, 1], [2, 2], [3, 1], 0),  # two moments of 22 bytes: the first counts
]
SENTENCES = {
    "maxima": "that is the sum of everything at its largest; these things are not there at one time: go through the moments "
    "and take the largest",
    "own kept": "while a layer runs forward, what it keeps is there already: count kept up to and including that layer",
    "freed before": "a layer's kept tensors are needed by its own backward, and freed after it: count them at that moment",
    "own gradient": "a layer's gradients are made during its own backward: count them at that moment",
    "gradients freed": "gradients stay until the optimizer's step: at a layer's backward those of all later layers are there",
    "never freed": "what layers keep is freed layer by layer as backward passes them, from the last to the first",
    "wrong end": "backward goes from the last layer to the first: at its start all that was kept is there, at its end nearly "
    "nothing",
    "no resident": "weights and optimizer state (`resident`) are there at every moment",
    "no step": "the optimizer's step is a moment of its own: resident, all gradients, and its own temporaries",
    "step kept": "when the optimizer steps, backward is over and everything that layers kept is freed",
    "only end of forward": "backward is not less than the end of the forward pass: a layer's own backward takes memory, too",
    "all gradients": "gradients appear layer by layer during backward: at its start there are none",
}


def every_moment(case: Case, slips: Slips) -> list[tuple[int, str]]:
    """(bytes, name) of each moment in the order of time, with these slips made."""
    layers = range(len(case.kept))
    base = 0 if "no resident" in slips else case.resident
    found = []
    for i in layers:
        before = sum(case.kept[: i if "own kept" in slips else i + 1])
        found.append((base + before + case.forward[i], f"forward {i}"))
    for i in [] if "only end of forward" in slips else reversed(layers):
        kept = sum(case.kept[: i if "freed before" in slips else i + 1])
        if "never freed" in slips:
            kept = sum(case.kept)
        if "wrong end" in slips:
            kept = sum(case.kept[i:])
        first = i + 1 if "own gradient" in slips else 0 if "all gradients" in slips else i
        gradients = case.gradients[i] if "gradients freed" in slips else sum(case.gradients[first:])
        found.append((base + kept + gradients + case.backward[i], f"backward {i}"))
    if "no step" not in slips:
        kept = sum(case.kept) if "step kept" in slips else 0
        found.append((base + kept + sum(case.gradients) + case.step, "step"))
    if "maxima" in slips:
        extra = max(*case.forward, *case.backward, case.step)
        return [(base + sum(case.kept) + sum(case.gradients) + extra, "")]
    return found


def worst(case: Case, slips: Slips) -> tuple[int, str]:
    return max(every_moment(case, slips), key=lambda moment: moment[0])


@lab.exercise("The worst moment of a step", importance=5, difficulty=3, minutes=20)
def worst_moment(find: Callable[..., Any]) -> str:
    """The largest of the moments and its name, for nine steps of one to six layers."""
    answers = []
    for case in CASES:
        answer = returned(find(*case), (tuple, list), "the worst moment")
        if len(answer) != 2 or not isinstance(answer[1], str):
            raise NotYet(f"give two things, the peak in bytes and the name of its moment, not {answer!r}")
        answers.append((number(answer[0], "the peak"), " ".join(answer[1].lower().split())))
    truth = [worst(case, NO_SLIP) for case in CASES]
    for case, mine, wanted in zip(CASES, answers, truth, strict=True):
        if mine[0] != wanted[0]:
            short = f"{case}: the peak is {wanted[0]} at {wanted[1]!r}, and you have {mine[0]:g}"
            why = named_mistake(
                [peak for peak, _ in answers], lambda case, slips: worst(case, slips)[0], CASES, SENTENCES
            )
            raise NotYet(f"{short}: {why or _nearest(case, mine[0])}")
    for case, mine, wanted in zip(CASES, answers, truth, strict=True):
        if mine != wanted:
            same = [name for peak, name in every_moment(case, NO_SLIP) if peak == wanted[0]]
            why = "two moments are as high, and the first of them counts" if mine[1] in same else _naming(mine[1])
            raise NotYet(f"{case}: {mine[0]:g} is right, and its moment is {wanted[1]!r}, not {mine[1]!r}: {why}")
    return f"{len(CASES)} steps; the peak was in forward, in backward at either end, in the middle and in the optimizer"


def _nearest(case: Case, mine: float) -> str:
    named = [name for peak, name in every_moment(case, NO_SLIP) if peak == mine]
    if mine > worst(case, NO_SLIP)[0]:
        return "no moment has as much: you add things that are not there at one time"
    return f"that is {named[0]!r}, which is not the highest" if named else "no moment of this step has that many"


def _naming(name: str) -> str:
    known = name == "step" or name.partition(" ")[0] in ("forward", "backward")
    return "layers are counted from 0" if known else "moments are called 'forward 0', 'backward 0' and 'step'"
