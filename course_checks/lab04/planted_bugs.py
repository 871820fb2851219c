"""Lab 4, exercise 6: a training script that works, with three bugs in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness import NotYet, close, nothing, phases, run_ranks, same
from course_checks.lab04 import on_ranks
from course_checks.lab04.common import lab
from course_lib.launch import Run


@lab.exercise("Three planted bugs", importance=5, difficulty=3, minutes=25)
def repaired(train: Callable[..., Any]) -> str:
    """Equal to one rank on the global batch; each bug that is still in there is recognised by what it leaves."""
    steps, micro_batch, lr = 6, 4, 1e-2
    evidence = ""
    for ranks in (2, 3):
        run = run_ranks(on_ranks.repaired, train, steps, micro_batch, lr, ranks=ranks, timeout=8)
        told = run.results
        if told[0]["model"] != "given":
            if told[0]["model"] in (None, ...):
                raise nothing("this rank's model")
            raise NotYet(f"train() must return this rank's model, and returned {told[0]['model']}")
        ends = [t["end"] for t in told]
        if any(not same(end, ends[0]) for end in ends[1:]):
            raise NotYet(_why_ranksdiffer(run))
        outcomes = told[0]["outcomes"]
        sentences = {
            "same rows": "every rank trains on the same rows: the work is repeated, not divided",
            "parameters": "parameters are averaged after the step where gradients should be averaged before it: under "
            "Adam that is another algorithm",
        }
        for name, sentence in sentences.items():
            if same(ends[0], outcomes[name]) and not same(outcomes[name], outcomes["right"]):
                raise NotYet(f"still planted: {sentence}")
        close(ends[0], outcomes["right"], rtol=1e-3, atol=1e-5, what="after training,")
        evidence = _right_training_traffic(run, steps)
    return f"equal to one rank on the global batch; {evidence}"


def _why_ranksdiffer(run: Run) -> str:
    kinds = {c.kind for c in phases(run, 0)[1]}
    if "all_reduce" not in kinds and "all_gather" not in kinds:
        return "still planted: the ranks end with different weights, and nothing is averaged between them"
    return (
        "still planted: the ranks end with different weights: averaged gradients keep equal models equal, so the models "
        "were not equal at the start (broadcast rank 0's)"
    )


def _right_training_traffic(run: Run, steps: int) -> str:
    sent = [c for c in phases(run, 0)[1] if c.kind in ("all_reduce", "all_gather", "reduce_scatter")]
    per_step = sum(c.bytes for c in sent) / steps
    expected = run.results[0]["gradient_bytes"]
    if per_step > 1.5 * expected:
        raise NotYet(f"{per_step:,.0f} bytes are averaged a step for {expected:,} bytes of gradients: once is enough")
    if per_step < 0.95 * expected:
        raise NotYet(
            f"the weights are right, and {per_step:,.0f} bytes are averaged a step for {expected:,} bytes of gradients: does "
            "every rank compute the whole global batch, or one for all? Each trains on its own rows, and gradients are averaged"
        )
    return f"{per_step:,.0f} bytes averaged a step"
