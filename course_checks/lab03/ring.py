"""Lab 3, exercise 1: the ring all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import NotYet, close, fresh_seed, in_bytes, named_seed
from course_checks.lab03 import on_ranks
from course_checks.lab03.common import lab, named, only_messages, run, scaled, sent

ITEM = 4  # bytes of a float32
EVEN = 2400  # divides by 2, 3 and 4
SHAPES = [
    ((EVEN,), torch.float32),
    ((EVEN + 1,), torch.float32),
    ((5, 7), torch.float64),
    ((2,), torch.float32),
]


@lab.exercise("Your own ring all-reduce", importance=5, difficulty=4, minutes=35)
def ring_all_reduce(all_reduce: Callable[..., Any]) -> str:
    """The sum on every rank, by messages to the neighbours, one chunk each, 2(n-1) of them."""
    evidence = ""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (4, 3, 2, 1):
            told = run(on_ranks.all_reduce, all_reduce, SHAPES, seed, ranks=ranks)
            for case, (shape, _) in enumerate(SHAPES):
                outcomes = [by_rank[case] for by_rank in told]
                elements = math.prod(shape)
                only_messages(outcomes, "it")
                _right_sum(outcomes, elements, ranks)
                if elements >= EVEN and ranks > 1:
                    seen = _is_a_ring(outcomes, elements, ranks)
                    evidence = evidence or seen
    return f"the exact sum on 1, 2, 3 and 4 ranks, whatever divides; {evidence}"


def _right_sum(outcomes: list[dict[str, Any]], elements: int, ranks: int) -> None:
    gots, expecteds = [o["got"] for o in outcomes], [o["expected"] for o in outcomes]
    right = [rank for rank in range(ranks) if torch.equal(gots[rank], expecteds[rank])]
    if len(right) == ranks:
        return
    wrong = [rank for rank in range(ranks) if rank not in right]
    first = outcomes[wrong[0]]
    if first["value"] is not None and torch.equal(first["value"].reshape_as(first["expected"]), first["expected"]):
        raise NotYet("the function returns the sum, and the tensor itself is not the sum: all-reduce works in place")
    if all(torch.equal(outcomes[r]["got"], outcomes[r]["before"]) for r in wrong) and not right:
        raise NotYet(f"on {ranks} ranks the tensor is as before on every rank: nothing was added, or not in place")
    scaled(gots, expecteds, ranks)
    if right:
        raise NotYet(
            f"on {ranks} ranks {named(right)} {'has' if len(right) == 1 else 'have'} the sum and {named(wrong)} not: "
            "an all-reduce ends with the sum on every rank"
        )
    shares = [float((got == expected).double().mean()) for got, expected in zip(gots, expecteds, strict=True)]
    if elements >= EVEN and all(0.9 / ranks < share < 1.1 / ranks for share in shares):
        if all(bool((got >= expected).all()) for got, expected in zip(gots, expecteds, strict=True)):
            raise NotYet(f"on {ranks} ranks the second round adds again: a chunk that is finished is copied, not added")
        raise NotYet(
            f"on {ranks} ranks each rank ends with one chunk of the sum: that was the reduce-scatter, the first half. "
            "Now the finished chunks go round the ring"
        )
    what = f"rank {wrong[0]} of {ranks}, {elements} elements,"
    if elements % ranks:
        what = f"right where {ranks} divides; with {elements} elements on {ranks} ranks the chunks differ in size, and"
    close(first["got"], first["expected"], rtol=0, what=what)


def _is_a_ring(outcomes: list[dict[str, Any]], elements: int, ranks: int) -> str:
    whole, chunk = elements * ITEM, math.ceil(elements / ranks) * ITEM
    for rank, outcome in enumerate(outcomes):
        messages = sent(outcome["messages"])
        total = sum(message.bytes for message in messages)
        strangers = {m.peer for m in messages} - {(rank - 1) % ranks, (rank + 1) % ranks}
        largest = max((message.bytes for message in messages), default=0)
        if largest >= whole:
            raise NotYet(
                f"rank {rank} of {ranks} sends the whole tensor in one message, {in_bytes(largest)}, and {in_bytes(total)} "
                f"in all: a ring passes chunks of one {ranks}th, and sends {in_bytes(2 * (ranks - 1) * chunk)}"
            )
        if strangers:
            raise NotYet(
                f"rank {rank} of {ranks} sends to rank {min(strangers)}, which is not its neighbour: in a ring a rank talks "
                f"to ranks {(rank - 1) % ranks} and {(rank + 1) % ranks} only"
            )
        if largest > chunk:
            raise NotYet(
                f"rank {rank} of {ranks} sends {in_bytes(largest)} in one step, and one {ranks}th of the tensor are "
                f"{in_bytes(chunk)}: cut it into {ranks} chunks of nearly equal size"
            )
        if total > 2 * (ranks - 1) * chunk:
            raise NotYet(
                f"rank {rank} of {ranks} sends {in_bytes(total)}, and 2(n-1)/n of the tensor are "
                f"{in_bytes(2 * (ranks - 1) * chunk)}: n-1 steps to add, n-1 to pass on, no more"
            )
        if total < 2 * (ranks - 1) * (elements // ranks) * ITEM:
            raise NotYet(
                f"rank {rank} of {ranks} sends {in_bytes(total)}, and a ring's 2(n-1) chunks are at least "
                f"{in_bytes(2 * (ranks - 1) * (elements // ranks) * ITEM)}: they must travel as messages of "
                "the process group"
            )
        if len(messages) > 2 * (ranks - 1):
            raise NotYet(
                f"rank {rank} of {ranks} sends {len(messages)} messages where a ring has 2(n-1) = {2 * (ranks - 1)} steps: "
                "each message pays the latency"
            )
    first = sent(outcomes[0]["messages"])
    return (
        f"{in_bytes(sum(m.bytes for m in first))} of a tensor of {in_bytes(whole)} left each of {ranks} ranks, in "
        f"{len(first)} messages of at most {in_bytes(max(m.bytes for m in first))}, to neighbours only"
    )
