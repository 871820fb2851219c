"""Lab 3, exercise 3: all-gather of shards that differ in size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import NotYet, close, fresh_seed, in_bytes, named_seed
from course_checks.lab03 import on_ranks
from course_checks.lab03.common import lab, named, only_messages, run, sent

ITEM = 4  # bytes of a float32
SHARDS = {
    4: [[500, 500, 500, 500], [700, 1, 0, 300]],
    3: [[1, 700, 300], [0, 0, 5]],
    2: [[300, 700]],
    1: [[5]],
}  # ranks -> for each case the elements of each rank's shard


@lab.exercise("All-gather with uneven shards", importance=4, difficulty=3, minutes=20)
def all_gather(all_gather: Callable[..., Any]) -> str:
    """Every rank ends with every shard, and no byte of padding crosses the wire."""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks, sizes in SHARDS.items():
            told = run(on_ranks.all_gather, all_gather, sizes, seed, ranks=ranks)
            for case, shards in enumerate(sizes):
                outcomes = [by_rank[case] for by_rank in told]
                only_messages(outcomes, "it")
                for rank, outcome in enumerate(outcomes):
                    _right_shards(outcome, rank, shards)
                _right_traffic(outcomes, shards)
    shards = SHARDS[4][1]
    return (
        f"every shard on 1, 2, 3 and 4 ranks, an empty one too; shards of {', '.join(map(str, shards))} elements took "
        f"{in_bytes(3 * sum(shards) * ITEM)} on the wire, padded ones would take {in_bytes(12 * max(shards) * ITEM)}"
    )


def _right_shards(outcome: dict[str, Any], rank: int, shards: list[int]) -> None:
    ranks, gots, expecteds = len(shards), outcome["got"], outcome["expected"]
    wrong = [i for i in range(ranks) if not torch.equal(gots[i], expecteds[i])]
    if not wrong:
        return
    if all(bool((gots[i] == on_ranks.UNTOUCHED).all()) for i in range(ranks)):
        raise NotYet(f"rank {rank} of {ranks} leaves the tensors of `outputs` untouched: fill them in place, copy_(…)")
    if wrong == [rank]:
        raise NotYet(
            f"rank {rank} of {ranks} lacks its own shard: outputs[{rank}] is part of the result on rank {rank} too"
        )
    at = wrong[0]
    source = [i for i in range(ranks) if i != at and torch.equal(gots[at], expecteds[i]) and shards[i]]
    if source:
        raise NotYet(f"on rank {rank} of {ranks} outputs[{at}] holds the shard of rank {source[0]}")
    if bool((gots[at] == on_ranks.UNTOUCHED).all()):
        raise NotYet(f"on rank {rank} of {ranks} the shard of {named(wrong)} never arrived")
    sizes = ", ".join(map(str, shards))
    close(gots[at], expecteds[at], rtol=0, what=f"rank {rank} of {ranks}, shards of {sizes} elements, outputs[{at}]")


def _right_traffic(outcomes: list[dict[str, Any]], shards: list[int]) -> None:
    ranks = len(shards)
    messages = [message for outcome in outcomes for message in sent(outcome["messages"])]
    total, wanted = sum(m.bytes for m in messages), (ranks - 1) * sum(shards) * ITEM
    padded = ranks * (ranks - 1) * max(shards) * ITEM
    sizes = ", ".join(map(str, shards))
    if total == padded != wanted:
        raise NotYet(
            f"with shards of {sizes} elements {in_bytes(total)} cross the wire where {in_bytes(wanted)} are enough: you pad "
            "every shard to the largest. The sizes are known, outputs has them: send each shard as long as it is"
        )
    if total > wanted:
        raise NotYet(
            f"with shards of {sizes} elements {in_bytes(total)} cross the wire, and {in_bytes(wanted)} are enough: each "
            "shard has to reach each other rank once"
        )
    if total < wanted:
        raise NotYet(
            f"with shards of {sizes} elements {in_bytes(total)} cross the wire, and it takes {in_bytes(wanted)}: the shards "
            "must travel as messages of the process group"
        )
    if len(messages) > ranks * (ranks - 1):
        raise NotYet(
            f"{len(messages)} messages on {ranks} ranks where n(n-1) = {ranks * (ranks - 1)} are enough: each pays the latency"
        )
