"""Lab 1, exercise 2: the bytes of weights, gradients and optimizer, and what ZeRO divides of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness import NotYet, named_mistake, number
from course_checks.lab01.common import NO_SLIP, Slips, factor, far, lab
from course_checks.lab01.published import ZERO_TABLE_1, last_digit

Case = tuple[int, int, int, tuple[int, int, int]]  # parameters, ranks, stage, bytes a parameter
MIXED = (2, 2, 12)
SENTENCES = {
    "nothing": "nothing is divided, whatever the stage: from stage 1 on the ranks share out the optimizer's state, from 2 on "
    "the gradients, at 3 the weights",
    "all": "stage 1 divides the optimizer's state only; weights and gradients stay whole on every rank",
    "gradients early": "stage 1 does not divide the gradients yet: that is stage 2",
    "weights for gradients": "stage 2 divides the gradients and leaves the weights whole; you have it the other way round",
    "weights early": "stage 2 leaves the weights whole: only stage 3 divides them",
    "gradients never": "from stage 2 on the gradients are divided over the ranks, too",
    "weights never": "stage 3 divides the weights as well",
    "optimizer never": "from stage 1 on the optimizer's state is divided over the ranks",
    "stage 0": "stage 0 is plain data parallelism: every rank holds everything, nothing is divided",
    "fixed": "bytes_per_parameter changes nothing in your answer: use it in place of 2, 2 and 12",
    "no master": "the optimizer's 12 bytes are an fp32 copy of the weight and Adam's two moments, 4 each: you have 8",
    "total": "the question is one rank's share, and you answer for all ranks together",
}
UNITS = {
    1e-9: "right in GB, and asked for are bytes: leave the division by 1e9 out",
    2.0**-30: "right in GiB, and asked for are bytes: leave the division by 2**30 out",
    2.0**30 / 1e9: "7% too much everywhere: you took a GB for 2**30 bytes, and it is 1e9",
    1e9 / 2.0**30: "7% too little everywhere: you took a GiB for 1e9 bytes, and it is 2**30",
    8.0: "8 times too much: these are bits",
}


def share(case: Case, slips: Slips) -> float:
    """Bytes on one rank, with these slips made."""
    params, ranks, stage, (weight, gradient, optimizer) = case
    if "fixed" in slips:
        weight, gradient, optimizer = MIXED
    if "no master" in slips:
        optimizer -= 4
    starts = {
        "optimizer": 9 if "optimizer never" in slips else 1,
        "gradient": 9 if "gradients never" in slips else 1 if "gradients early" in slips else 2,
        "weight": 9 if "weights never" in slips else 2 if "weights early" in slips else 3,
    }
    if "nothing" in slips:
        starts = dict.fromkeys(starts, 9)
    if "all" in slips:
        starts = dict.fromkeys(starts, 1)
    if "weights for gradients" in slips:
        starts["weight"], starts["gradient"] = 2, 3
    if "stage 0" in slips and stage == 0:
        stage = 1
    total = ranks if "total" in slips else 1
    each = {"optimizer": optimizer, "gradient": gradient, "weight": weight}
    return total * sum(params * each[part] / (ranks if stage >= start else 1) for part, start in starts.items())


@lab.exercise("The model states, and what ZeRO divides", importance=5, difficulty=2, minutes=15)
def state_bytes(state: Callable[..., Any]) -> str:
    """Table 1 of the ZeRO paper to its printed digits; other precisions and stage 0 exactly."""
    cases: list[Case] = []
    for params, ranks in ((7_500_000_000, 1), (7_500_000_000, 64), (134_515_008, 3), (8_030_261_248, 8)):
        for each in (MIXED, (2, 4, 12), (4, 4, 8)):
            cases += [(params, ranks, stage, each) for stage in range(4)]
    yours = [number(state(*case), "the bytes of a rank") for case in cases]
    truth = [share(case, NO_SLIP) for case in cases]
    wrong = far(yours, truth, atol=3.0)  # whole bytes or fractions of them, both will do
    if wrong:
        (params, ranks, stage, each), mine, right = cases[wrong[0]], yours[wrong[0]], truth[wrong[0]]
        story = f"{params:,} parameters on {ranks} rank{'s' * (ranks > 1)} at stage {stage} with {each} bytes"
        units = factor(yours, truth, UNITS)
        if units:
            raise NotYet(f"{story} take {right:,.0f} bytes a rank, and you answer {mine:,.0f}: {units}")
        why = (
            named_mistake(yours, share, cases, SENTENCES, rtol=1e-6)
            or "which of the three parts does this stage divide?"
        )
        raise NotYet(f"{story} take {right / 1e9:.3f} GB a rank, and you have {mine / 1e9:.3f}: {why}")
    for (billions, ranks), row in ZERO_TABLE_1.items():
        for stage, printed in enumerate(row, 1):
            mine = number(state(int(billions * 1e9), ranks, stage), "the bytes of a rank") / 1e9
            if abs(mine - float(printed)) > max(0.003 * float(printed), last_digit(printed)):
                where = f"{billions:g}B on {ranks} ranks at stage {stage}"
                raise NotYet(f"the paper has {printed} GB for {where}; you have {mine:.4g} GB")
    return f"all {3 * len(ZERO_TABLE_1)} figures of arXiv:1910.02054, table 1; fp32 and fp32 gradients to the byte"
