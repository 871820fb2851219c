"""Lab 4, exercise 2: gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness.checking import NotYet, close, ratio_hint, returned
from course_checks.harness.phases import phases
from course_checks.lab04 import on_ranks
from course_checks.lab04.common import ATOL, RTOL, differ, lab
from course_lib.launch import Run, launch


@lab.exercise("Gradient accumulation equal to the big batch", importance=5, difficulty=3, minutes=20)
def accumulated_step(step: Callable[..., Any]) -> str:
    """Parity with the whole batch for equal and unequal micro-batches; gradients cross the wire once a step."""
    evidence = ""
    for ranks, sizes in ((1, [2, 2]), (2, [2, 2, 2]), (2, [3, 2, 1]), (3, [1, 1, 1, 1])):
        run = launch(on_ranks.accumulate, step, sizes, ranks=ranks, timeout=8, backend="gloo", quiet=True)
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
    if len(set(sizes)) > 1 and (len(got) != len(expected) or differ(got, expected)):
        raise NotYet(
            f"with micro-batches of {sizes} rows the gradients differ from the big batch's: a mean of means weighs the "
            "small micro-batch as much as the large one; weigh each loss by its share of the rows"
        )
    close(got, expected, rtol=RTOL, atol=ATOL, what="the gradient before the optimizer's step")
    if told["left"]:
        raise NotYet("gradients are left over after the step: the next step would add to them; zero_grad() at the end")
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
