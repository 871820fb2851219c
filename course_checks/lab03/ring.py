"""Lab 3, exercise 1: a ring of any order, over pieces of any sizes; each half of it gives something new."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_checks.harness import Contract, LiveTensors, fresh_seed, in_bytes, named_seed
from course_checks.lab03.common import ITEM, Seen, by_messages, lab, run, values, watched

SCATTER, GATHER, MEMORY = "what reduce_scatter returns", "what all_gather returns", "reduce_scatter beside its input"
SLACK = 4096  # bytes of small tensors
HINTS = {
    "the next rank is the next one in `order`, not rank + 1": lambda f: (
        f["clause"] == "peer" and f["peers"] == {(f["rank"] + 1) % f["ranks"]}
    ),
    "that is the rank before you in `order`": lambda f: f["clause"] == "peer" and f["peers"] == {f["before"]},
    "pass on what you have just added up, and nothing else": lambda f: f["clause"] == "sent" and f["more"],
    "that is the size of another rank's piece: which one must arrive last, and so where does it set out?": lambda f: (
        f["clause"] == SCATTER and f[SCATTER].numel() in f["sizes"] and f[SCATTER].numel() != f["sizes"][f["rank"]]
    ),
    "that is one rank's piece: who adds on the way?": lambda f: f["clause"] == SCATTER and f["alone"],
    "your own numbers are not in it, or twice": lambda f: f["clause"] == SCATTER and f["own"],
    "each piece lies where the sizes before it put it, not in the order of the ring": lambda f: (
        f["clause"] == GATHER and f["shuffled"]
    ),
    "a copy of the whole input? You need the piece that goes out, the one that comes in, and their sum": lambda f: (
        f["clause"] == MEMORY
    ),
}


def cases(seed: int) -> list[tuple[list[int], list[int]]]:
    """(order, sizes): pieces that tell each other apart, small ones with an empty one among them, fewer ranks."""
    draw, made = random.Random(seed), []
    for ranks, least, most in ((4, 8000, 12000), (4, 1, 9), (3, 500, 900), (2, 500, 900), (1, 500, 900)):
        order, sizes = draw.sample(range(ranks), ranks), draw.sample(range(least, most), ranks)
        while ranks > 2 and (order[1] - order[0]) % ranks == (order[2] - order[1]) % ranks == 1:
            draw.shuffle(order)  # not the order of their numbers
        if most < 10:
            sizes[draw.randrange(ranks)] = 0
        made.append((order, sizes))
    return made


def on_a_rank(ring: Callable[..., Any], given: list[tuple[list[int], list[int]]], seed: int) -> list[Any]:
    rank, seen = dist.get_rank(), []
    for number, (order, sizes) in enumerate(given):
        made = ring(list(order))
        x, piece = values(sum(sizes), seed + number, rank), values(sizes[rank], seed - number, rank)
        before = x.clone(), piece.clone()
        with LiveTensors(every=True) as live:
            scattered = watched(lambda made=made, x=x, sizes=sizes: made.reduce_scatter(x, list(sizes)), number)
        gathered = watched(lambda made=made, p=piece, sizes=sizes: made.all_gather(p, list(sizes)), number + 1)
        kept = torch.equal(x, before[0]) and torch.equal(piece, before[1])
        seen.append((scattered, gathered, live.highest, kept))
    return seen


@lab.exercise("A ring in the order of the wires", importance=5, difficulty=4, minutes=30)
def ring(your_ring: Callable[..., Any]) -> str:
    """Sums of the own piece and all pieces, each by n - 1 messages to the next rank in the order."""
    seed = fresh_seed()
    given = cases(seed)
    said = ""
    with named_seed(seed):
        for ranks in (4, 3, 2, 1):
            mine = [(number, case) for number, case in enumerate(given) if len(case[0]) == ranks]
            results_by_rank = run(on_a_rank, your_ring, [case for _, case in mine], seed, ranks=ranks)
            for rank, results in enumerate(results_by_rank):
                for number, (case, result) in enumerate(zip(mine, results, strict=True)):
                    said = _right(case[1], result, rank, seed, number) or said
    return said


def _right(case: tuple[list[int], list[int]], seen: Any, rank: int, seed: int, number: int) -> str:
    (order, sizes), (scattered, gathered, highest, kept) = case, seen
    ranks, place = len(order), order.index(rank)
    after, before = order[(place + 1) % ranks], order[place - 1]
    inputs = [values(sum(sizes), seed + number, r) for r in range(ranks)]
    pieces = [values(size, seed - number, r) for r, size in enumerate(sizes)]
    summed = [x.split(sizes)[rank] for x in inputs]
    facts = {"rank": rank, "ranks": ranks, "sizes": sizes, "before": before}
    contract = Contract(HINTS, facts, f"rank {rank} of {ranks}, order {order}, sizes {sizes}")
    for name, call, left_out in (("reduce_scatter", scattered, rank), ("all_gather", gathered, after)):
        by_messages(contract, call)
        contract.facts["peers"] = {c.peer for c in call.sends}
        astray = contract.facts["peers"] - {after}
        contract.holds(
            not astray, f"{name} sends to rank {min(astray, default=0)}; next in the order is rank {after}", "peer"
        )
        _carries(contract, name, call, sum(sizes) - sizes[left_out], ranks)
    contract.facts["own"] = _like(scattered.result, sum(summed) - summed[rank], sum(summed) + summed[rank])
    contract.facts["alone"] = ranks > 1 and _like(scattered.result, *summed)
    contract.values(SCATTER, scattered.result, sum(summed), rtol=0)
    contract.facts["shuffled"] = _like(gathered.result, torch.cat([pieces[r] for r in order]))
    contract.values(GATHER, gathered.result, torch.cat(pieces), rtol=0)
    contract.holds(kept, "the input has changed: backward may still want it")
    if max(sizes) < 1000 or ranks < 4:
        return ""
    contract.memory(MEMORY, highest, at_most=3 * ITEM * max(sizes) + SLACK)
    sent = sum(c.bytes for c in scattered.sends)
    return (
        f"exact sums on 4, 3, 2 and 1 ranks, an empty piece among them; in the order {order} rank {rank} sent "
        f"{in_bytes(sent)} of {in_bytes(ITEM * sum(sizes))}, and held {in_bytes(highest)} beside its input"
    )


def _carries(contract: Contract, name: str, call: Seen, numbers: int, ranks: int) -> None:
    sent, messages = sum(c.bytes for c in call.sends), len(call.sends)
    contract.facts["more"] = sent > ITEM * numbers
    told = (
        f"{name} sends {in_bytes(sent)} in {messages} messages, and should send {in_bytes(ITEM * numbers)} in at most "
    )
    contract.holds(sent == ITEM * numbers and messages <= ranks - 1, f"{told}{ranks - 1}", "sent")


def _like(yours: Any, *others: torch.Tensor) -> bool:
    return any(isinstance(yours, torch.Tensor) and torch.equal(yours, other) for other in others)
