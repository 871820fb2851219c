"""Lab 5, exercise 2: a checkpoint of some ranks made into one for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import Contract, NotYet, fresh, fresh_seed, named_seed, returned
from course_checks.lab05.common import LENGTH, VOCAB, Tied, flat, lab, next_token_loss, trained

Shard = dict[str, Any]
NAMES = ("weights", "exp_avg", "exp_avg_sq")
CASES = (
    (13, 4, 3),
    (13, 3, 4),
    (13, 4, 1),
    (13, 1, 4),
    (5, 2, 8),
    (50, 12, 5),
    (12, 4, 2),
)  # elements, ranks, new ranks
HINTS = {
    "the old shards' padding is still between the weights": lambda f: f["is"](f["glued"](padding=True)),
    "they are glued in the order of the list: go by shard['rank']": lambda f: f["is"](f["glued"](by_rank=False)),
    "moments of zeros start Adam anew, and the loss jumps": lambda f: not f["yours"].any(),
}


def cut(whole: dict[str, torch.Tensor], ranks: int, step: int) -> list[Shard]:
    """Shards of flat vectors as a folder lists them: by name, so that rank 10 comes before rank 2."""
    numel = len(whole["weights"])
    size = -(-numel // ranks)
    padded = {name: torch.cat([values, torch.zeros(size * ranks - numel)]) for name, values in whole.items()}
    about = {"ranks": ranks, "numel": numel, "step": step}
    shards = [
        {"rank": r, **about} | {n: t[r * size : (r + 1) * size].clone() for n, t in padded.items()}
        for r in range(ranks)
    ]
    return sorted(shards, key=lambda shard: f"rank-{shard['rank']}.pt")


def glued(shards: list[Shard], name: str, *, padding: bool = False, by_rank: bool = True) -> torch.Tensor:
    ordered = sorted(shards, key=lambda shard: shard["rank"]) if by_rank else shards
    whole = torch.cat([shard[name] for shard in ordered])
    return whole if padding else whole[: shards[0]["numel"]]


@lab.exercise("Resharding a checkpoint", importance=5, difficulty=3, minutes=20)
def reshard(reshard: Callable[..., Any]) -> str:
    """The same vectors in new shards, padding only at the end; a torn checkpoint is refused; training goes on the same."""
    seed = fresh_seed()
    with named_seed(seed):
        for numel, ranks, new in CASES:
            whole = {name: fresh((numel,), seed, i) for i, name in enumerate(NAMES)}
            _right(
                reshard(cut(whole, ranks, 7), new),
                cut(whole, ranks, 7),
                new,
                f"{numel} elements, {ranks} ranks to {new}",
            )
    _refuses(reshard)
    return _goes_on(reshard)


def _right(answer: Any, shards: list[Shard], ranks: int, about: str) -> list[Shard]:
    contract = Contract(HINTS, about=about)
    answer = returned(answer, (list, tuple), "the list of new shards")
    contract.holds(len(answer) == ranks, f"{len(answer)} shards; a rank whose share is all padding has one, too")
    size = -(-shards[0]["numel"] // ranks)
    for rank, shard in enumerate(answer):
        returned(shard, dict, f"shard {rank}")
        expected = {"rank": rank, "ranks": ranks, "numel": shards[0]["numel"], "step": shards[0]["step"]}
        for key, value in expected.items():
            contract.holds(
                key in shard and shard[key] == value, f"{key!r} of shard {rank} is {shard.get(key)}, not {value}"
            )
        for name in NAMES:
            mine = returned(shard.get(name), torch.Tensor, f"{name!r} of shard {rank}")
            right = glued(shards, name)[rank * size : (rank + 1) * size]
            right = torch.cat([right, torch.zeros(size - len(right))])

            def equals(vector: torch.Tensor, mine: torch.Tensor = mine, rank: int = rank) -> bool:
                length = -(-len(vector) // ranks)
                piece = vector[rank * length : (rank + 1) * length]
                return torch.equal(mine[: len(piece)], piece)

            contract.facts |= {
                "yours": mine,
                "is": equals,
                "glued": lambda name=name, **how: glued(shards, name, **how),
            }
            contract.values(f"{name!r} of shard {rank}", mine, right, rtol=0.0)
            behind = mine.untyped_storage().nbytes()
            view = f"{name!r} of shard {rank} is a view, and torch.save writes all {behind:,} bytes behind it: clone()"
            contract.holds(behind <= 2 * mine.nbytes + 64, view)
    return list(answer)


def _refuses(reshard: Callable[..., Any]) -> None:
    whole = cut({name: torch.ones(13) for name in NAMES}, 4, 3)
    torn = {
        "one of four shards is missing": whole[:3],
        "rank 1's shard comes twice, and rank 2's is missing": [whole[0], whole[1], whole[1], whole[3]],
        "one shard is of step 2, the others of step 3": [*whole[:3], whole[3] | {"step": 2}],
    }
    for what, shards in torn.items():
        try:
            reshard(shards, 2)
        except ValueError:
            continue
        raise NotYet(f"{what}, and you put a checkpoint together all the same: raise ValueError")


def _goes_on(reshard: Callable[..., Any]) -> str:
    """Three steps, cut for 4 ranks, resharded for 3, and two steps more; against five steps."""
    torch.manual_seed(0)
    model = Tied()
    vector = torch.nn.Parameter(flat(trained(model)))
    optimizer = torch.optim.AdamW([vector], lr=1e-2)

    def train(first: int, last: int) -> torch.Tensor:
        for step in range(first, last):
            pieces = vector.detach().split([p.numel() for p in trained(model)])
            for p, piece in zip(trained(model), pieces, strict=True):
                p.data.copy_(piece.view_as(p))
            model.zero_grad()
            tokens = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(step))
            next_token_loss(model, tokens).backward()
            vector.grad = flat(p.grad for p in trained(model))
            optimizer.step()
        return vector.detach().clone()

    saved = {"weights": train(0, 3)} | {name: optimizer.state[vector][name].clone() for name in NAMES[1:]}
    expected = train(3, 5)
    shards = cut(saved, 4, 3)
    new = _right(reshard(shards, 3), shards, 3, f"{len(vector):,} elements, 4 ranks to 3")
    for name, target in zip(NAMES, (vector.data, *(optimizer.state[vector][n] for n in NAMES[1:])), strict=True):
        target.copy_(glued(new, name))
    optimizer.state[vector]["step"].fill_(new[0]["step"])
    off = (train(3, 5) - expected).abs().max().item()
    Contract().holds(off == 0, f"training goes on, and a weight ends {off:.2g} off")
    return f"{len(CASES)} checkpoints and a real one: cut for 4 ranks after step 3, it goes on as if nobody had; off by {off:g}"
