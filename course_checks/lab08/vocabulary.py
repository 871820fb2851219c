"""Lab 8, exercise 2: cross-entropy over a vocabulary that no rank has in whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import ATOL, RTOL, NotYet, close, phases, run_ranks
from course_checks.lab08 import vocabulary_on_ranks as there
from course_checks.lab08.common import RANKS, SIZES, lab, members
from course_checks.lab08.vocabulary_on_ranks import CASES, TOKENS, VOCAB, Case
from course_lib.observe import Collective

NUMBERS = 3  # a token needs: the maximum, the sum of exponentials, the target's logit


@lab.exercise("Vocabulary-parallel cross-entropy", importance=5, difficulty=4, minutes=35)
def vocabulary_loss(loss_of: Callable[..., Any]) -> str:
    """PyTorch's loss and gradient, stable, with three numbers a token on the wire and no logits."""
    run = run_ranks(there.vocabulary_loss, loss_of, ranks=RANKS)
    sent = 0
    for number, size in enumerate(SIZES):
        for index, case in enumerate(CASES):
            at = 1 + 3 * (number * len(CASES) + index)
            for rank in range(RANKS):
                forward, backward = phases(run, rank)[at : at + 2]
                _traffic(forward, backward, rank, size)
                if size == RANKS:
                    sent = sum(c.bytes for c in forward)
            for rank in range(RANKS):
                told = run.results[rank][size][index]
                logits, targets = there.question(case, rank // size)
                _loss(told, logits, targets, case, rank, size)
                _gradient(told, logits, targets, case, rank, size)
    return (
        f"loss and gradient are PyTorch's in groups of 1, 2 and 4, logits of ±1,000 included; {sent} bytes a rank for {TOKENS} "
        f"tokens, where {VOCAB} logits each would be {4 * TOKENS * VOCAB:,}"
    )


def _traffic(forward: list[Collective], backward: list[Collective], rank: int, size: int) -> None:
    for collective in (*forward, *backward):
        if collective.group != members(rank, size):
            raise NotYet(
                f"rank {rank} calls {collective.kind} over the ranks {collective.group}; its group is {members(rank, size)}: pass "
                "group=… to every collective"
            )
    if size == 1:
        return
    large = [c for c in forward if c.kind != "all_reduce" and c.bytes >= 4 * TOKENS * VOCAB // size]
    if large:
        raise NotYet(
            f"a {large[0].kind} of {large[0].bytes:,} bytes: the logits travel. They are the largest tensor of the model; "
            f"{NUMBERS} numbers a token are enough, whatever the vocabulary"
        )
    allowed, total = 4 * NUMBERS * TOKENS, sum(c.bytes for c in forward)
    if total > allowed:
        raise NotYet(
            f"forward puts {total:,} bytes into collectives for {TOKENS} tokens: {NUMBERS} fp32 numbers each are {allowed:,}"
        )
    if total < 4 * TOKENS:
        raise NotYet(
            f"forward puts {total:,} bytes into collectives for {TOKENS} tokens: the sums of exponentials alone are "
            f"{4 * TOKENS:,}, and no rank has them by itself"
        )
    if backward:
        raise NotYet(
            f"backward calls {backward[0].kind} ({backward[0].bytes:,} bytes): each rank has the softmax of its own columns, and "
            "that is all that their gradient needs. Keep it from forward"
        )


def _loss(told: dict[str, Any], logits: Any, targets: Any, case: Case, rank: int, size: int) -> None:
    where = f"rank {rank} in a group of {size}, {case.name}: the loss"
    mine, expected = told["loss"].double(), there.answer(logits, targets)[0]
    if not torch.isfinite(mine):
        why = "overflows" if case.offset >= 0 else "underflows to 0, whose logarithm is -inf"
        small = case.scale == 1.0
        raise NotYet(
            f"{where} is {mine.item()}"
            + ("" if small else f": exp {why}. Subtract the largest logit of the row (over all ranks) before exp")
        )
    if abs(mine - expected) <= 1e-4 + RTOL * abs(expected):
        return
    for mistake, words in there.LOSSES.items():
        told_wrong = there.mistaken_loss(logits, targets, size, rank % size, mistake)
        if size > 1 and abs(mine - told_wrong) <= 1e-4 + RTOL * abs(told_wrong):
            raise NotYet(f"{where} is {mine.item():.5g} where {expected.item():.5g} is right: {words}")
    close(mine, expected, rtol=RTOL, atol=1e-4, what=where)


def _gradient(told: dict[str, Any], logits: Any, targets: Any, case: Case, rank: int, size: int) -> None:
    where = f"rank {rank} in a group of {size}, {case.name}: the gradient of the logits"
    mine, expected = told["gradient"], there.answer(logits, targets)[1].chunk(size, 1)[rank % size]
    if mine is None:
        raise NotYet(f"{where} is missing: backward should return it first")
    if _same(mine, expected):
        return
    if not torch.isfinite(mine).all():
        raise NotYet(
            f"{where} holds {mine[~torch.isfinite(mine)][0].item()}: exp of a logit without its maximum taken off?"
        )
    for mistake, words in there.GRADIENTS.items():
        wrong = there.mistaken_gradient(logits, targets, size, rank % size, mistake)
        if size > 1 and _same(mine, wrong.float()):
            raise NotYet(f"{where} is off: {words}")
    close(mine, expected, rtol=RTOL, atol=ATOL, what=where)


def _same(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return mine.shape == other.shape and torch.allclose(mine, other, rtol=1e-3, atol=1e-6)
