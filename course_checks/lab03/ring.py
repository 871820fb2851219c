"""Lab 3, exercise 1: a ring of any order, over pieces of any sizes; each half of it gives something new."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_checks.harness import Contract, LiveTensors, fresh_seed, in_bytes, named_seed
from course_checks.lab03.common import ITEM, by_messages, equal, lab, run, values, watched

SCATTER, GATHER, MEMORY = "what reduce_scatter returns", "what all_gather returns", "reduce_scatter beside its input"
SLACK = 4096  # bytes of small tensors
Case = tuple[list[int], list[int]]  # order and sizes
HINTS = {
    "the next rank is the next one in `order`, not rank + 1": lambda f: (
        f["clause"] == "peer" and f["peers"] == {(f["rank"] + 1) % f["ranks"]}
    ),
    "that is the rank before you in `order`": lambda f: f["clause"] == "peer" and f["peers"] == {f["before"]},
    "that is the size of another rank's piece: which one must arrive last, and so where does it set out?": lambda f: (
        f["clause"] == SCATTER and len(f[SCATTER]) in f["sizes"] and len(f[SCATTER]) != f["sizes"][f["rank"]]
    ),
    "that is one rank's piece: who adds on the way?": lambda f: f["clause"] == SCATTER and f["alone"],
    "your own numbers are not in it, or twice": lambda f: f["clause"] == SCATTER and f["own"],
    "each piece lies where the sizes before it put it, not in the order of the ring": lambda f: (
        f["clause"] == GATHER and f["shuffled"]
    ),
    "you need the piece that goes out, the one that comes in, and their sum": lambda f: f["clause"] == MEMORY,
}


def cases(ranks: int, seed: int) -> list[Case]:
    """Two for one ring: pieces that tell each other apart, and small ones with an empty one among them."""
    draw = random.Random(seed + ranks)
    order = draw.sample(range(ranks), ranks)
    while ranks > 2 and (order[1] - order[0]) % ranks == (order[2] - order[1]) % ranks == 1:
        draw.shuffle(order)  # not the order of their numbers
    large, small = draw.sample(range(8000, 12000), ranks), draw.sample(range(1, 9), ranks)
    small[draw.randrange(ranks)] = 0 if ranks > 1 else 7
    return [(order, large), (order, small)]


def on_a_rank(ring: Callable[..., Any], given: list[Case], seed: int) -> list[Any]:
    rank, made, seen = dist.get_rank(), ring(list(given[0][0])), []
    for number, (_, sizes) in enumerate(given):
        x, piece = values(sum(sizes), seed + number, rank), values(sizes[rank], seed - 9 - number, rank)
        before = x.clone(), piece.clone(), x._version, piece._version
        with LiveTensors(every=True) as live:
            scattered = watched(lambda x=x, sizes=sizes: made.reduce_scatter(x, list(sizes)))
        gathered = watched(lambda piece=piece, sizes=sizes: made.all_gather(piece, list(sizes)))
        kept = (
            torch.equal(x, before[0]) and torch.equal(piece, before[1]) and (x._version, piece._version) == before[2:]
        )
        result = scattered.result
        shared = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() == x.data_ptr()
        seen.append((scattered, gathered, live.highest, kept, shared))
    return seen


@lab.exercise("A ring in the order of the wires", importance=5, difficulty=4, minutes=35)
def ring(your_ring: Callable[..., Any]) -> str:
    """Sums of the own piece and all pieces, each by n - 1 messages to the next rank in the order."""
    seed, said = fresh_seed(), ""
    with named_seed(seed):
        for ranks in (5, 3, 2, 1):
            given = cases(ranks, seed)
            about = f"order {given[0][0]}, sizes {given[0][1]} and then {given[1][1]}: "
            for rank, results in enumerate(run(on_a_rank, your_ring, given, seed, ranks=ranks, about=about)):
                for number, (case, result) in enumerate(zip(given, results, strict=True)):
                    evidence = _right(case, result, rank, seed, number)
                    said = said or evidence
    return said


def _right(case: Case, seen: Any, rank: int, seed: int, number: int) -> str:
    (order, sizes), (scattered, gathered, highest, kept, shared) = case, seen
    ranks, place = len(order), order.index(rank)
    after = order[(place + 1) % ranks]
    pieces = [values(size, seed - 9 - number, r) for r, size in enumerate(sizes)]
    summed = [values(sum(sizes), seed + number, r).split(sizes)[rank] for r in range(ranks)]
    facts = {"rank": rank, "ranks": ranks, "sizes": sizes, "before": order[place - 1]}
    contract = Contract(HINTS, facts, f"rank {rank} of {ranks}, order {order}, sizes {sizes}")
    calls = (("reduce_scatter", scattered, rank), ("all_gather", gathered, after))
    for name, call, _ in calls:
        by_messages(contract, call)
        contract.facts["peers"] = {c.peer for c in call.sends}
        astray = contract.facts["peers"] - {after}
        told = f"{name} sends to rank {min(astray, default=0)}; next in the order is rank {after}"
        contract.holds(not astray, told, "peer")
    contract.facts["own"] = _like(scattered.result, sum(summed) - summed[rank], sum(summed) + summed[rank])
    contract.facts["alone"] = ranks > 1 and _like(scattered.result, *summed)
    equal(contract, SCATTER, scattered.result, sum(summed))
    contract.facts["shuffled"] = _like(gathered.result, torch.cat([pieces[r] for r in order]))
    equal(contract, GATHER, gathered.result, torch.cat(pieces))
    for name, call, left_out in calls:
        sent, due = sum(c.bytes for c in call.sends), ITEM * (sum(sizes) - sizes[left_out])
        told = (
            f"{name} sends {in_bytes(sent)} in {len(call.sends)} messages, and should send {in_bytes(due)} in at most "
        )
        contract.holds(sent == due and len(call.sends) <= ranks - 1, f"{told}{ranks - 1}", "sent")
    contract.holds(kept, "the input has changed, or was written to: backward may still want it")
    contract.holds(not shared, f"{SCATTER} is a part of x: who changes the one changes the other")
    if ranks < 5 or number:
        return ""
    contract.memory(MEMORY, highest, at_most=3 * ITEM * max(sizes) + SLACK)
    return (
        f"exact sums on 5, 3, 2 and 1 ranks, an empty piece among them; in the order {order} rank {rank} sent "
        f"{in_bytes(sum(c.bytes for c in scattered.sends))} of {in_bytes(ITEM * sum(sizes))}, and held {in_bytes(highest)} "
        "beside its input"
    )


def _like(yours: Any, *others: torch.Tensor) -> bool:
    return any(isinstance(yours, torch.Tensor) and torch.equal(yours, other) for other in others)
