"""Lab 5, exercise 1: bytes a rank holds under each stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from course_checks.harness import NotYet, in_bytes, named_mistake, number
from course_checks.lab05.common import NO_SLIP, Slips, far, lab


class Case(NamedTuple):
    """Parameters and how many of them are trained, ranks, stage; bytes a weight, a gradient, an optimizer's state."""

    parameters: int
    trainable: int
    ranks: int
    stage: int
    weights: int = 2
    gradients: int = 2
    states: int = 12


PUBLISHED = [Case(7_500_000_000, 7_500_000_000, 64, stage) for stage in range(4)]  # arXiv:1910.02054, figure 1
LORA = [Case(8_000_000_000, 42_000_000, 8, stage) for stage in range(4)]
CASES = [
    *PUBLISHED,
    *(Case(1_000, 1_000, 8, stage) for stage in range(4)),
    *(Case(10, 10, 4, stage) for stage in range(4)),
    *(Case(10, 7, 4, stage) for stage in range(4)),
    *(Case(1_003, 1_003, 3, stage, 4, 4, 8) for stage in range(4)),
    *(Case(3, 3, 4, stage) for stage in range(4)),
    *(Case(999, 999, 1, stage) for stage in range(4)),
    *LORA,
]
SENTENCES = {
    "GB": "that is in GB: give bytes",
    "GiB": "that is in GiB: give bytes",
    "all divided": "you divide everything from stage 1 on: stage 1 shares out the optimizer's states, stage 2 the gradients, "
    "too, and only stage 3 the weights",
    "gradients at 1": "stage 1 leaves the gradients whole: sharing them is what stage 2 adds",
    "gradients whole": "from stage 2 on a rank keeps its slice of the gradients only",
    "weights whole": "at stage 3 the weights are shared out, too",
    "states whole": "from stage 1 on the optimizer's states are shared out",
    "floor": "the rest of the division is dropped: parameters that nobody holds are never trained",
    "no padding": "no rank holds a fraction of a parameter: a slice is the number of parameters over the ranks, rounded up",
    "bytes rounded": "you round bytes up where parameters are counted: a slice has whole parameters",
    "frozen too": "frozen parameters have neither gradients nor states: those are counted for the trainable ones alone",
    "frozen stay": "stage 3 shares out all weights, the frozen ones too",
    "constants": "2, 2 and 12 bytes are the paper's mixed-precision Adam: take the function's own arguments",
}


def bytes_of(case: Case, slips: Slips) -> float:
    """What a rank holds, with these slips made."""
    parameters, trainable, ranks, stage, weights, gradients, states = case
    if "constants" in slips:
        weights, gradients, states = 2, 2, 12
    if "frozen too" in slips:
        trainable = parameters
    first = {
        "states": 9 if "states whole" in slips else 1,
        "gradients": 1 if slips & {"gradients at 1", "all divided"} else 3 if "gradients whole" in slips else 2,
        "weights": 1 if "all divided" in slips else 9 if "weights whole" in slips else 3,
    }

    def held(each: int, count: int, what: str) -> float:
        if stage < first[what]:
            return each * count
        if "no padding" in slips:
            return each * count / ranks
        if "floor" in slips:
            return each * (count // ranks)
        return -(-each * count // ranks) if "bytes rounded" in slips else each * -(-count // ranks)

    of_weights = held(weights, parameters, "weights")
    if "frozen stay" in slips:
        of_weights = held(weights, trainable, "weights") + weights * (parameters - trainable)
    total = of_weights + held(gradients, trainable, "gradients") + held(states, trainable, "states")
    return total / 1e9 if "GB" in slips else total / 2**30 if "GiB" in slips else total


@lab.exercise("Bytes a rank, stage by stage", importance=5, difficulty=2, minutes=15)
def bytes_per_rank(bytes_per_rank: Callable[..., Any]) -> str:
    """Exact to the byte for every stage, uneven counts, other precisions and frozen weights; no stage 4."""
    yours = [number(_asked(bytes_per_rank, case), "the bytes of a rank") for case in CASES]
    truth = [bytes_of(case, NO_SLIP) for case in CASES]
    if wrong := far(yours, truth):
        case = CASES[wrong[0]]
        short = (
            f"{case.parameters:,} parameters, {case.trainable:,} of them trained, {case.ranks} ranks, stage {case.stage}, "
            f"{case.weights} + {case.gradients} + {case.states} bytes: you have {_shown(yours[wrong[0]])} and a rank holds "
            f"{in_bytes(truth[wrong[0]])}"
        )
        why = named_mistake(yours, bytes_of, CASES, SENTENCES)
        raise NotYet(f"{short}{f': {why}' if why else '. Count weights, gradients and states apart'}")
    for stage in (4, -1):
        try:
            answer = bytes_per_rank(100, 100, 2, stage)
        except ValueError:
            continue
        raise NotYet(f"there is no stage {stage}, and you give it {answer} bytes: raise ValueError")
    paper = ", ".join(f"{mine / 1e9:.1f}" for mine in yours[:4])
    lora = ", ".join(f"{mine / 1e9:.1f}" for mine in yours[-4:])
    return (
        f"7.5B parameters on 64 ranks take {paper} GB at stages 0 to 3, as in figure 1 of arXiv:1910.02054. With 42M of LoRA on "
        f"a frozen 8B, 8 ranks: {lora} GB: stages 1 and 2 have next to nothing to share there"
    )


def _asked(function: Callable[..., Any], case: Case) -> Any:
    return function(
        case.parameters,
        case.trainable,
        case.ranks,
        case.stage,
        weights=case.weights,
        gradients=case.gradients,
        states=case.states,
    )


def _shown(value: float) -> str:
    return in_bytes(value) if value == int(value) else f"{value:,.4g}"
