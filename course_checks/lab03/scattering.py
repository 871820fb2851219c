"""Lab 3, exercise 2: reduce-scatter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import NotYet, close, fresh_seed, in_bytes, named_seed
from course_checks.lab03 import on_ranks
from course_checks.lab03.common import lab, named, only_messages, run, scaled, sent

PIECES = [((600,), torch.float32), ((3, 5), torch.float64)]  # the shape of one rank's piece


@lab.exercise("Reduce-scatter", importance=5, difficulty=3, minutes=20)
def reduce_scatter(reduce_scatter: Callable[..., Any]) -> str:
    """Rank r ends with the sum of all pieces r, each rank sends n-1 pieces, and the inputs stay as they were."""
    evidence = ""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (4, 3, 2, 1):
            told = run(on_ranks.reduce_scatter, reduce_scatter, PIECES, seed, ranks=ranks)
            for case, (shape, dtype) in enumerate(PIECES):
                outcomes = [by_rank[case] for by_rank in told]
                only_messages(outcomes, "it")
                _right_piece(outcomes, ranks)
                seen = _right_traffic(outcomes, math.prod(shape) * dtype.itemsize, ranks)
                evidence = evidence or seen
    return f"the exact sums on 1, 2, 3 and 4 ranks; {evidence}"


def _right_piece(outcomes: list[dict[str, Any]], ranks: int) -> None:
    gots = [outcome["got"] for outcome in outcomes]
    expecteds = [outcome["expected"][rank] for rank, outcome in enumerate(outcomes)]
    wrong = [rank for rank in range(ranks) if not torch.equal(gots[rank], expecteds[rank])]
    if wrong:
        rank, first = wrong[0], outcomes[wrong[0]]
        if bool((first["got"] == on_ranks.UNTOUCHED).all()):
            raise NotYet(f"rank {rank} of {ranks} leaves `output` untouched: fill it in place, output.copy_(…)")
        scaled(gots, expecteds, ranks)
        other = [i for i in range(ranks) if i != rank and torch.equal(first["got"], first["expected"][i])]
        if other:
            raise NotYet(
                f"rank {rank} of {ranks} ends with the sum of the pieces for rank {other[0]}: count again with which piece "
                "the first step begins, and which one is finished when the last step is over"
            )
        if torch.equal(first["got"], first["before"][rank]):
            raise NotYet(f"rank {rank} of {ranks} ends with its own piece {rank} alone: nothing was added to it")
        if len(wrong) < ranks:
            right = [r for r in range(ranks) if r not in wrong]
            raise NotYet(f"on {ranks} ranks the piece is right on {named(right)}, and wrong on {named(wrong)}")
        close(first["got"], expecteds[rank], rtol=0, what=f"rank {rank} of {ranks}, the output")
    if any(outcome["changed"] for outcome in outcomes):
        rank = next(rank for rank, outcome in enumerate(outcomes) if outcome["changed"])
        raise NotYet(f"rank {rank} of {ranks} changes its inputs: partial sums belong into a copy")


def _right_traffic(outcomes: list[dict[str, Any]], piece: int, ranks: int) -> str:
    wanted = (ranks - 1) * piece
    for rank, outcome in enumerate(outcomes):
        messages = sent(outcome["messages"])
        total = sum(message.bytes for message in messages)
        if total == 2 * wanted and ranks > 2:
            raise NotYet(
                f"rank {rank} of {ranks} sends {in_bytes(total)}: that is an all-reduce, of which you keep one piece. "
                f"Reduce-scatter is its first half, {in_bytes(wanted)}"
            )
        if total > wanted:
            raise NotYet(
                f"rank {rank} of {ranks} sends {in_bytes(total)} where n-1 pieces, {in_bytes(wanted)}, are enough: a rank "
                "never needs to send what is its own, nor a piece twice"
            )
        if total < wanted:
            raise NotYet(
                f"rank {rank} of {ranks} sends {in_bytes(total)}, and the sums need n-1 pieces of it, {in_bytes(wanted)}: "
                "the pieces must travel as messages of the process group"
            )
        if len(messages) > ranks - 1:
            raise NotYet(f"rank {rank} of {ranks} sends {len(messages)} messages where n-1 = {ranks - 1} are enough")
    return f"each of {ranks} ranks sent {in_bytes(wanted)} of {in_bytes(ranks * piece)}, its inputs stayed as they were"
