"""Lab 5, exercise 2: a checkpoint of some ranks made into one for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import Contract, NotYet, fresh, fresh_seed, named_seed, returned
from course_checks.lab05.common import lab

Shard = dict[str, Any]
NAMES = ("weights", "exp_avg", "exp_avg_sq")
# elements, ranks, new ranks
CASES = ((13, 4, 3), (13, 3, 4), (13, 4, 1), (13, 1, 4), (5, 2, 8), (50, 12, 5), (50, 12, 12), (12, 4, 2))
TORN = {
    "one of four shards is missing": lambda shards: shards[:3],
    "rank 1's shard comes twice, and rank 2's is missing": lambda shards: [*shards[:2], shards[1], shards[3]],
    "one shard is of step 2, the others of step 3": lambda shards: [*shards[:2], shards[2] | {"step": 2}, shards[3]],
}
HINTS = {
    "moments of zeros start Adam anew, and the loss jumps": lambda f: not f["answer"][0]["exp_avg"].any(),
    "the old shards' padding is still between the weights": lambda f: f["like"](sorted(f["old"], key=_rank)),
    "they are joined in the order of the list: go by shard['rank']": lambda f: f["like"](f["old"]),
}


def _rank(shard: Shard) -> int:
    return shard["rank"]


def cut(whole: dict[str, torch.Tensor], ranks: int) -> list[Shard]:
    """Shards of flat vectors, in order of rank."""
    numel = len(whole["weights"])
    size = -(-numel // ranks)
    pieces = {name: torch.cat([v, torch.zeros(size * ranks - numel)]).chunk(ranks) for name, v in whole.items()}
    about = {"ranks": ranks, "numel": numel, "step": 3}
    return [{"rank": r, **about, **{name: pieces[name][r].clone() for name in NAMES}} for r in range(ranks)]


@lab.exercise("Resharding a checkpoint", importance=5, difficulty=3, minutes=15)
def reshard(reshard: Callable[..., Any]) -> str:
    """The same vectors in new shards, padded at the end alone; a torn checkpoint is refused."""
    seed = fresh_seed()
    with named_seed(seed):
        for numel, ranks, new in CASES:
            whole = {name: fresh((numel,), seed, i) for i, name in enumerate(NAMES)}
            old = sorted(cut(whole, ranks), key=lambda shard: f"rank-{shard['rank']}.pt")  # as a folder lists them
            contract = Contract(HINTS, {"old": old}, f"{numel} elements, {ranks} ranks to {new}")
            _right(contract, reshard(old, new), cut(whole, new))
    for what, tear in TORN.items():
        try:
            reshard(tear(cut({name: torch.ones(13) for name in NAMES}, 4)), 4)
        except ValueError:
            continue
        raise NotYet(f"{what}, and you put a checkpoint together all the same: raise ValueError")
    return f"{len(CASES)} checkpoints, for fewer and for more ranks, equal to the last bit; {len(TORN)} torn ones are refused"


def _right(contract: Contract, answer: Any, expected: list[Shard]) -> None:
    answer = returned(answer, (list, tuple), "the list of new shards")
    told = f"{len(answer)} shards, not {len(expected)}: a rank whose share is all padding has one, too"
    contract.holds(len(answer) == len(expected), told)

    def like(shards: list[Shard]) -> bool:
        yours, right, wrong = (torch.cat([shard["weights"] for shard in each]) for each in (answer, expected, shards))
        length = min(len(yours), len(wrong))
        return not torch.equal(yours, right) and torch.equal(yours[:length], wrong[:length])

    contract.facts |= {"answer": answer, "like": like}
    for rank, (shard, right) in enumerate(zip(answer, expected, strict=True)):
        contract.values(f"shard {rank}", returned(shard, dict, f"shard {rank}"), right, rtol=0.0)
        for name in NAMES:
            contract.holds(
                shard[name].dtype == right[name].dtype, f"{name!r} of shard {rank} is in {shard[name].dtype}"
            )
            behind = shard[name].untyped_storage().nbytes()
            view = f"{name!r} of shard {rank} is a view, and torch.save writes all {behind:,} bytes behind it: clone()"
            contract.holds(behind <= 2 * shard[name].nbytes + 64, view)
