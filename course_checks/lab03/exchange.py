"""Lab 3, exercise 6: an all-to-all of pieces of any sizes, from send and receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_checks.harness import Contract, fresh_seed, in_bytes, named_seed, returned
from course_checks.lab03.common import ITEM, Seen, by_messages, equal, lab, run, values, watched

RANKS = (4, 3, 1)
HINTS = {
    "your own piece stays at home": lambda f: f["rank"] in f["peers"],
    "a piece goes straight to the rank that it is for, and nowhere else": lambda f: f["clause"] == "sent",
    "that is a piece for another rank": lambda f: f["clause"] == "received" and f["elsewhere"],
}


def table(ranks: int, seed: int) -> list[list[int]]:
    """[from][to] numbers, some of them none."""
    sizes = torch.randint(50, 500, (ranks, ranks), generator=torch.Generator().manual_seed(seed))
    for rank in range(ranks - 1):
        sizes[rank, (rank + 2) % ranks] = 0
    return sizes.tolist()


def pieces_of(sizes: list[list[int]], seed: int, rank: int) -> list[torch.Tensor]:
    return [values(size, seed + 31 * to, rank) for to, size in enumerate(sizes[rank])]


def on_a_rank(all_to_all: Callable[..., Any], tables: list[list[list[int]]], seed: int) -> list[tuple[Seen, bool]]:
    seen = []
    for number, sizes in enumerate(tables):
        pieces, given = pieces_of(sizes, seed + number, dist.get_rank()), [list(row) for row in sizes]
        mine = list(pieces)
        before = [piece.clone() for piece in pieces]
        call = watched(lambda mine=mine, given=given: all_to_all(mine, given))
        kept = given == sizes and list(map(id, mine)) == list(map(id, pieces)) and all(map(torch.equal, pieces, before))
        seen.append((call, kept))
    return seen  # what the first call returned must not be overwritten by the second


@lab.exercise("An all-to-all that sends no byte twice", importance=3, difficulty=2, minutes=10)
def all_to_all(your_all_to_all: Callable[..., Any]) -> str:
    """Every piece at the rank that it is for; each rank sends its pieces for others once, one message each."""
    seed, said = fresh_seed(), ""
    with named_seed(seed):
        for ranks in RANKS:
            tables = [table(ranks, seed), table(ranks, seed + 1)]
            for rank, results in enumerate(run(on_a_rank, your_all_to_all, tables, seed, ranks=ranks)):
                for number, (sizes, (call, kept)) in enumerate(zip(tables, results, strict=True)):
                    evidence = _right(call, kept, sizes, rank, seed + number)
                    said = said or evidence
    return said


def _right(call: Seen, kept: bool, sizes: list[list[int]], rank: int, seed: int) -> str:
    ranks = len(sizes)
    peers = [c.peer for c in call.sends]
    contract = Contract(HINTS, {"rank": rank, "peers": peers}, f"rank {rank} of {ranks}")
    by_messages(contract, call)
    got = returned(call.result, (list, tuple), "the list of pieces, one from each rank")
    contract.holds(len(got) == ranks, f"returns {len(got)} pieces, and should return one from each of {ranks} ranks")
    for source in range(ranks):
        everybodys = pieces_of(sizes, seed, source)
        contract.facts["elsewhere"] = any(
            isinstance(got[source], torch.Tensor) and torch.equal(got[source], piece)
            for piece in everybodys[:rank] + everybodys[rank + 1 :]
        )
        equal(contract, "received", got[source], everybodys[rank])
    contract.holds(kept, "the lists that it was given have changed, or the pieces in them")
    sent, least = sum(c.bytes for c in call.sends), ITEM * (sum(sizes[rank]) - sizes[rank][rank])
    told = (
        f"sends {in_bytes(sent)} to ranks {sorted(peers)}, and should send {in_bytes(least)}, once to each other rank"
    )
    contract.holds(sent == least and len(set(peers)) == len(peers), told, "sent")
    return f"every piece at its rank on 4, 3 and 1 ranks, empty ones too; rank {rank} of {ranks} sent {in_bytes(sent)}"
