"""Lab 4, exercise 2: gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness import ATOL, RTOL, NotYet, close, phases, ratio_hint, returned, run_ranks, same
from course_checks.lab04 import on_ranks
from course_checks.lab04.common import lab
from course_lib.launch import Run


@lab.exercise("Gradient accumulation equal to the big batch", importance=5, difficulty=3, minutes=20)
def accumulated_step(step: Callable[..., Any]) -> str:
    """Parity with the whole batch for equal and unequal micro-batches; gradients cross the wire once a step."""
    evidence = ""
    for ranks, sizes in ((1, [2, 2]), (2, [2, 2, 2]), (2, [3, 2, 1]), (3, [1, 1, 1, 1])):
        run = run_ranks(on_ranks.accumulate, step, sizes, ranks=ranks, timeout=8)
        for told in run.results:
            _right_accumulation(told, sizes)
        if ranks > 1:
            evidence = _travelled_once(run, sizes)
    return f"equal to the big batch also for micro-batches of 3, 2 and 1 rows; {evidence}"


def _right_accumulation(told: dict[str, Any], sizes: list[int]) -> None:
    if not told["kept"]:
        raise NotYet("the optimizer never stepped: call optimizer.step() once, after the last micro-batch")
    if len(told["kept"]) > 1:
        raise NotYet(f"the optimizer stepped {len(told['kept'])} times: it steps once, after the last micro-batch")
    got, expected, n = told["kept"][0], told["expected"], len(sizes)
    hint = ratio_hint(
        got,
        expected,
        {
            n: f"your gradients are exactly {n} times too large: {n} micro-batch means were added up without their weights",
            1 / n: f"your gradients are exactly {n} times too small: you divided by the number of micro-batches twice",
        },
    )
    if hint:
        raise NotYet(hint)
    if len(set(sizes)) > 1 and (len(got) != len(expected) or not same(got, expected)):
        raise NotYet(
            f"with micro-batches of {sizes} rows the gradients differ from the big batch's: a mean of means weighs the "
            "small micro-batch as much as the large one; weigh each loss by its share of the rows"
        )
    close(got, expected, rtol=RTOL, atol=ATOL, what="the gradient before the optimizer's step")
    got, expected = told["second"]
    if set(got) != set(expected) or not same(got, expected):
        raise NotYet(
            "the first step is right and the second is not: gradients are left over from the first, and the second adds to "
            "them. Call zero_grad() once a step, before the first micro-batch or after the optimizer's step"
        )
    forwards = [rows for rows in told["passes"] if rows]
    if max(forwards) > max(sizes):
        raise NotYet(
            f"the model is given {max(forwards)} rows at once, and a micro-batch has {max(sizes)} at most: that is the big "
            "batch, whose activations do not fit. Run the micro-batches one after the other"
        )
    if any(one and other for one, other in zip(told["passes"], told["passes"][1:], strict=False)):
        raise NotYet(
            "two forward passes come one after the other, so the graphs of several micro-batches are in memory at once: call "
            "backward() for each micro-batch before the next one's forward"
        )
    loss = returned(told["loss"], (int, float), "the loss that your step returns")
    close(loss, told["expected_loss"], rtol=1e-4, what="the loss that your step returns")


def _travelled_once(run: Run, sizes: list[int]) -> str:
    total = run.results[0]["gradient_bytes"]
    sent = sum(c.bytes for c in phases(run, 0)[1] if c.kind == "all_reduce")
    times = sent / total
    if times > 1.05:
        raise NotYet(
            f"the gradients crossed the wire {times:.0f} times in one step of {len(sizes)} micro-batches: use no_sync() "
            "for all but the last, around forward and backward both (DDP decides in forward)"
        )
    if times < 0.95:
        raise NotYet("the gradients never crossed the wire: the last micro-batch must synchronise")
    return f"{sent:,} bytes of gradients a step, once for {len(sizes)} micro-batches"
