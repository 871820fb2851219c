"""Lab 5, exercise 3: an optimizer whose states are shared out over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import ATOL, RTOL, NotYet, close, in_bytes, phases, run_ranks, same
from course_checks.lab05 import on_ranks
from course_checks.lab05.common import SLACK, lab, slots
from course_lib.launch import Run

WORDS = {
    "sgd": "your steps are those of plain SGD: AdamW's two moments are what there is to shard",
    "no decay": "your weights do not decay: weight_decay never reached the update",
    "coupled decay": "your steps are Adam's with weight decay added to the gradient; AdamW shrinks the weights themselves",
    "always step 1": "every step is corrected for bias as if it were the first: the step counter must go on",
}


@lab.exercise("An optimizer that is shared out", importance=5, difficulty=4, minutes=35)
def sharded_optimizer(make_optimizer: Callable[..., Any]) -> str:
    """AdamW's numbers, a slice of its states on each rank, and one all_gather of the slices a step."""
    evidence: dict[int, str] = {}
    for ranks in (2, 4, 3, 1):
        told = run_ranks(on_ranks.sharded_optimizer, make_optimizer, ranks=ranks)
        for rank, each in enumerate(told.results):
            _right_numbers(each, rank, ranks)
        _right_traffic(told, ranks)
        if (
            ranks > 2
        ):  # on two ranks all of Adam's states are as many bytes as a slice of them and a copy of the weights
            evidence[ranks] = _right_memory([each["held"] for each in told.results], told.results, ranks)
        elif ranks == 2:
            on_two = told.results
        else:
            evidence[2] = _right_memory([each["held"] for each in on_two], on_two, 2)
            evidence[1] = _right_memory([each["held"] for each in told.results], told.results, 1)
    return (
        f"AdamW's weights on 1, 2, 3 and 4 ranks; beside weights and gradients each of 4 ranks holds {evidence[4]}, of 3 "
        f"{evidence[3]}, of 2 {evidence[2]}, one alone {evidence[1]}; one slice a step into an all_gather"
    )


def _right_numbers(told: dict[str, Any], rank: int, ranks: int) -> None:
    if told["frozen_moved"]:
        raise NotYet("the frozen layer moved: leave out parameters that do not require a gradient")
    for step, (got, expected) in enumerate(zip(told["after"], told["expected"], strict=True)):
        if same(got, expected):
            continue
        where = f"rank {rank} of {ranks}, after step {step + 1}"
        before = told["after"][step - 1] if step else told["start"]
        raise NotYet(f"{where}: {_why(got, expected, before, told['mistakes'], step, rank, ranks)}")
    close(told["after"][-1], told["expected"][-1], rtol=RTOL, atol=ATOL, what=f"rank {rank} of {ranks}, the weights")


def _why(
    got: torch.Tensor,
    expected: torch.Tensor,
    before: torch.Tensor,
    mistakes: dict[str, Any],
    step: int,
    rank: int,
    ranks: int,
) -> str:
    size, total = slots(len(got), ranks), len(got)
    mine = slice(rank * size, (rank + 1) * size)
    if torch.equal(got, before):
        return "the weights are as they were: the update must arrive in the model's own parameters (p.data.copy_(…))"
    elsewhere = torch.ones(total, dtype=torch.bool)
    elsewhere[mine] = False
    if ranks > 1 and same(got[mine], expected[mine]) and torch.equal(got[elsewhere], before[elsewhere]):
        return (
            "this rank's slice is right, the others' are as they were: gather the other ranks' slices after the update"
        )
    rest = total % ranks
    if rest and torch.equal(got[-rest:], before[-rest:]) and same(got[:-rest], expected[:-rest]):
        return f"the last {rest} of {total:,} parameters never change: {total:,} does not divide by {ranks}, so pad"
    pieces, wanted = got.split(size), expected.split(size)
    moved = [
        (i, j)
        for i, piece in enumerate(pieces)
        for j, other in enumerate(wanted)
        if i != j and same(piece[: len(other)], other[: len(piece)])  # the last one is shorter
    ]
    if moved:
        i, j = moved[0]
        return (
            f"slice {i} of the weights holds what belongs into slice {j}: rank r's slice begins at r times its length"
        )
    for name, after in mistakes.items():
        if same(got, after[step]) and not same(after[step], expected):
            return WORDS[name]
    worst = int((got - expected).abs().argmax())
    story = f"{int((~torch.isclose(got, expected, RTOL, ATOL)).sum()):,} of {total:,} weights are off, most at flat index {worst}"
    if step:
        return (
            f"{story}. The step before was right: the moments must live on from step to step, and each step must read "
            "the new gradients"
        )
    return (
        f"{story}, which is in the slice of rank {worst // size}: yours {got[worst]:.6g}, AdamW's {expected[worst]:.6g}"
    )


def _right_traffic(told: Run, ranks: int) -> None:
    if ranks == 1:
        return
    total = 4 * len(told.results[0]["start"])
    piece = 4 * slots(total // 4, ranks)
    for rank in range(ranks):
        sent = [c for phase in phases(told, rank)[2:] for c in phase]
        kinds = {c.kind for c in sent}
        if "all_reduce" in kinds:
            num_bytes = sum(c.bytes for c in sent if c.kind == "all_reduce") / on_ranks.STEPS
            raise NotYet(
                f"a step all-reduces {in_bytes(num_bytes)}. The gradients are averaged already, and of the weights a rank "
                "lacks only what the others updated: an all_gather of the slices moves half of what an all_reduce does"
            )
        if "broadcast" in kinds:
            raise NotYet(
                "a step broadcasts: with one rank after another sending, the links of all others wait. One all_gather of "
                "slices of equal length does it at once"
            )
        if kinds - {"all_gather"}:
            raise NotYet(f"a step uses {', '.join(sorted(kinds - {'all_gather'}))}: one all_gather is all it takes")
        mean = sum(c.bytes for c in sent) / on_ranks.STEPS
        if mean > 1.05 * piece + 64:
            raise NotYet(
                f"rank {rank} of {ranks} {_too_much(mean, piece, total, told.results[0]['frozen_bytes'], ranks)}"
            )

    sent = sum(c.bytes for rank in range(ranks) for phase in phases(told, rank)[2:] for c in phase) / on_ranks.STEPS
    if sent < 0.95 * total:
        raise NotYet(
            f"the ranks send {in_bytes(sent)} a step, and there are {in_bytes(total)} of updated weights: every rank "
            "updates all of them, then, and nothing is sharded. Update this rank's slice and gather the others'"
        )


def _too_much(mean: float, piece: int, total: int, frozen: int, ranks: int) -> str:
    story = f"puts {in_bytes(mean)} a step into all_gather, and its slice has {in_bytes(piece)}"
    if abs(mean - 4 * slots((total + frozen) // 4, ranks)) <= 64:
        return f"{story}: the frozen layer travels too, and it never changes"
    if abs(mean - total) <= 0.02 * total:
        return f"{story}: that is every weight of the model; send the slice that this rank updated"
    if abs(mean - 3 * piece) <= 0.02 * piece:
        return f"{story}: three times as much, as if the moments travelled too; they stay where they are used"
    return f"{story}: send each updated weight once"


def _right_memory(held: list[int], told: list[dict[str, Any]], ranks: int) -> str:
    total = len(told[0]["start"])
    size, moments = slots(total, ranks), 8 * slots(total, ranks)
    most = 12 * size + SLACK
    for rank, num_bytes in enumerate(held):
        least = 8 * max(0, min(size, total - rank * size))
        story = f"rank {rank} of {ranks} keeps {in_bytes(num_bytes)} between steps, beside weights and gradients"
        if num_bytes <= most:
            # whoever cuts otherwise than by flat slices may hold less here and more elsewhere, but not much less
            if num_bytes < 0.9 * least and sum(held) < 0.9 * 8 * total:
                raise NotYet(
                    f"{story}; AdamW's moments of its slice are {in_bytes(least)}: keep them in tensors, on the rank"
                )
            continue
        if told[rank]["behind_views"]:
            raise NotYet(
                f"{story}: your slices are views, and a view keeps the whole tensor behind it alive "
                f"({in_bytes(told[rank]['behind_views'])}). Make tensors of the slice's own size, or .clone() the slice"
            )
        if ranks > 1 and abs(num_bytes - 8 * total) <= 2 * size + SLACK and min(held) > most:
            raise NotYet(
                f"{story}: Adam's two moments of all {total:,} parameters. The numbers are right and nothing is sharded: "
                f"keep moments for the slice alone, {in_bytes(moments)}"
            )
        if ranks > 1 and min(held) < 0.7 * max(held) and sum(held) <= 12 * total + ranks * SLACK:
            raise NotYet(
                f"the states are shared out unevenly, from {in_bytes(min(held))} to {in_bytes(max(held))}: whole tensors never "
                "come out even. Cut the flat vector into slices of equal length"
            )
        extra = num_bytes - moments
        if extra >= 0.9 * 4 * total:
            raise NotYet(
                f"{story}: the moments of its slice are {in_bytes(moments)} of it, and the rest is a second copy of all weights "
                "or gradients. Let flat vectors go when step() is over"
            )
        raise NotYet(
            f"{story}. The moments of its slice are {in_bytes(moments)}, and a copy of the slice would be "
            f"{in_bytes(4 * size)}: let go of the rest, such as the slice's gradient"
        )
    return in_bytes(max(held))
