"""Lab 5, exercise 5: a checkpoint of some ranks made into one for another number of ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from course_checks.harness import ATOL, RTOL, NotYet, close, in_bytes, returned, run_ranks
from course_checks.lab05 import on_ranks
from course_checks.lab05.common import lab, slots
from course_checks.lab05.on_ranks import SHARDED

Shard = dict[str, Any]
SAVED_AT, RESUMED_AT, CUT, STEPS = 4, 3, 3, 5  # ranks before and after; steps before the cut, steps in all
WORLDS = [
    (13, 4, 3),
    (13, 3, 4),
    (13, 4, 1),
    (13, 1, 4),
    (5, 2, 8),
    (50, 12, 5),
    (12, 4, 2),
]  # elements, ranks, new ranks
FILE_SLACK = 4096  # bytes of a file beside its tensors

SENTENCES = {
    "padding kept": "the old shards' padding is still in there, between the weights: cut what is glued together to `numel`, "
    "and pad anew",
    "list order": "the shards are glued in the order of the list, which is that of a folder (rank 10 comes before rank 2): go by "
    "shard['rank']",
    "backwards": "the slices are glued in the wrong order: rank 0 has the beginning of the flat vector",
    "moments swapped": "exp_avg and exp_avg_sq have changed places: the mean of the gradients and the mean of their squares",
    "moments new": "the moments are all zero: resuming with them is a new start of Adam, and the loss jumps",
    "weights alone": "exp_avg and exp_avg_sq are those of the old slices: glue and cut them as the weights",
}


def glue(shards: list[Shard], name: str, *, padding: bool = False, order: str = "rank") -> torch.Tensor:
    ordered = (
        shards if order == "list" else sorted(shards, key=lambda shard: shard["rank"], reverse=order == "backwards")
    )
    whole = torch.cat([shard[name] for shard in ordered])
    return whole if padding else whole[: shards[0]["numel"]]


def cut(whole: torch.Tensor, ranks: int, size: int) -> list[torch.Tensor]:
    padded = torch.cat([whole, torch.zeros(ranks * size)])
    return [padded[rank * size : (rank + 1) * size].clone() for rank in range(ranks)]


def resharded(shards: list[Shard], ranks: int, kind: str = "right") -> list[Shard]:
    """The new shards; ``kind`` names a known mistake."""
    numel = shards[0]["numel"]
    source = {name: name for name in SHARDED}
    if kind == "moments swapped":
        source |= {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    kept = kind == "padding kept"
    order = {"list order": "list", "backwards": "backwards"}.get(kind, "rank")
    by_name = {}
    for name in SHARDED:
        whole = glue(shards, source[name], padding=kept, order=order)
        by_name[name] = cut(whole, ranks, slots(len(whole), ranks))
        if kind == "moments new" and name != "weights":
            by_name[name] = [torch.zeros_like(piece) for piece in by_name[name]]
    same = {"ranks": ranks, "numel": numel, "step": shards[0]["step"]}
    return [{"rank": r, **same, **{name: by_name[name][r] for name in SHARDED}} for r in range(ranks)]


def saved(numel: int, ranks: int) -> list[Shard]:
    """Shards as a folder lists them: by name, so that rank 10 comes before rank 2."""
    generator = torch.Generator().manual_seed(numel)
    whole = {name: torch.randn(numel, generator=generator) for name in SHARDED}
    whole["exp_avg_sq"] = whole["exp_avg_sq"].square()
    pieces = {name: cut(values, ranks, slots(numel, ranks)) for name, values in whole.items()}
    same = {"ranks": ranks, "numel": numel, "step": 3}
    shards = [{"rank": r, **same, **{name: pieces[name][r] for name in SHARDED}} for r in range(ranks)]
    return sorted(shards, key=lambda shard: f"shard-{shard['rank']}.pt")


@lab.exercise("A checkpoint for other ranks", importance=5, difficulty=3, minutes=25)
def reshard(reshard: Callable[..., Any]) -> str:
    """The same training goes on at another number of ranks; nothing of the padding survives; torn checkpoints are refused."""
    for numel, old, new in WORLDS:
        shards = saved(numel, old)
        answer = reshard(list(shards), new)
        _right_shards(answer, shards, new, f"{numel} parameters from {old} ranks to {new}")
    _refuses(reshard)
    return _resumes(reshard)


def _right_shards(answer: Any, shards: list[Shard], ranks: int, case: str) -> None:
    answer = returned(answer, (list, tuple), "the new shards")
    wanted = resharded(shards, ranks)
    if len(answer) != ranks:
        raise NotYet(f"{case}: you give {len(answer)} shards: one a rank, also for a rank whose slice is all padding")
    for rank, (mine, right) in enumerate(zip(answer, wanted, strict=True)):
        mine = returned(mine, dict, f"shard {rank}")
        if missing := [key for key in right if key not in mine]:
            raise NotYet(f"{case}: shard {rank} lacks {missing[0]!r}: it needs {', '.join(right)}, as the old ones")
        for key in ("rank", "ranks", "numel", "step"):
            if mine[key] != right[key]:
                raise NotYet(f"{case}: shard {rank} says {key} {mine[key]}, and that should be {right[key]}")
        for name in SHARDED:
            returned(mine[name], torch.Tensor, f"{name!r} of shard {rank}")
    kinds = {kind: resharded(shards, ranks, kind) for kind in SENTENCES if kind != "weights alone"}
    if not _equal(answer, wanted):
        found = [kind for kind, variant in kinds.items() if _equal(answer, variant) and not _equal(variant, wanted)]
        if (
            not found
            and _equal(answer, wanted, ("weights",))
            and all(s["exp_avg"].shape == s["weights"].shape for s in answer)
        ):
            found = ["weights alone"]
        raise NotYet(f"{case}: {SENTENCES[found[0]] if found else _what_differs(answer, wanted, ranks)}")


def _equal(answer: Any, wanted: list[Shard], names: tuple[str, ...] = SHARDED) -> bool:
    pairs = zip(answer, wanted, strict=True)
    return all(torch.equal(mine[name].float(), right[name]) for mine, right in pairs for name in names)


def _what_differs(answer: Any, wanted: list[Shard], ranks: int) -> str:
    for rank, (mine, right) in enumerate(zip(answer, wanted, strict=True)):
        for name in SHARDED:
            got, size = mine[name], len(right[name])
            if got.shape != right[name].shape:
                real = wanted[0]["numel"] - rank * size
                why = "the last slices are padded with zeros, so that all have the same length" if real < size else ""
                why = why or f"{wanted[0]['numel']} parameters over {ranks} ranks, rounded up"
                return f"{name} of shard {rank} has the shape {tuple(got.shape)}, and should have ({size},): {why}"
            if not torch.equal(got.float(), right[name]):
                at = int((got.float() != right[name]).nonzero()[0])
                return f"{name} of shard {rank} is off at [{at}]: yours {got[at]:.5g}, expected {right[name][at]:.5g}"
    raise AssertionError("they are equal")


def _refuses(reshard: Callable[..., Any]) -> None:
    whole = saved(13, 4)
    torn = {
        "three of four shards are there": whole[:3],
        "rank 1's shard is there twice, and rank 2's never": [whole[0], whole[1], whole[1], whole[3]],
        "one shard is of step 2, the others of step 3": [*whole[:3], whole[3] | {"step": 2}],
    }
    for what, shards in torn.items():
        try:
            reshard(list(shards), 2)
        except ValueError:
            continue
        except Exception as error:
            raise NotYet(
                f"{what}: say so with a ValueError; now it is {type(error).__name__}: {str(error)[:80]}"
            ) from error
        raise NotYet(f"{what}, and you put a checkpoint together all the same: raise ValueError")


def _resumes(reshard: Callable[..., Any]) -> str:
    """Train on 4 ranks, save, re-shard the files, go on on 3; against 4 ranks that were never interrupted."""
    saved_by = run_ranks(on_ranks.train_on_shards, None, 0, STEPS, CUT, ranks=SAVED_AT).results
    whole = saved_by[0]["weights"]
    with tempfile.TemporaryDirectory() as folder:
        for told in saved_by:
            torch.save(told["shard"], Path(folder) / f"shard-{told['shard']['rank']}.pt")
        shards = [torch.load(path, weights_only=True) for path in sorted(Path(folder).glob("shard-*.pt"))]
        new, sizes = [], []
        for shard in reshard(shards, RESUMED_AT):
            path = Path(folder) / f"new-{shard['rank']}.pt"
            torch.save(shard, path)
            sizes.append(path.stat().st_size)
            new.append(torch.load(path, weights_only=True))
    size = slots(len(whole), RESUMED_AT)
    if sizes[0] > len(SHARDED) * 4 * size + FILE_SLACK:
        raise NotYet(
            f"saved, the shard of rank 0 is a file of {in_bytes(sizes[0])} where its tensors have {in_bytes(12 * size)}: they are "
            "views, and torch.save writes the whole tensor behind a view: .clone() each slice"
        )
    again = run_ranks(on_ranks.train_on_shards, new, CUT, STEPS, ranks=RESUMED_AT).results
    for rank, told in enumerate(again):
        close(
            told["weights"],
            whole,
            rtol=RTOL,
            atol=ATOL,
            what=f"resumed on {RESUMED_AT} ranks, the weights on rank {rank}",
        )
    off = max(float((told["weights"] - whole).abs().max()) for told in again)
    return (
        f"saved by {SAVED_AT} ranks after step {CUT}, resumed by {RESUMED_AT}: after step {STEPS} the {len(whole):,} weights are "
        f"within {off:.1g} of a run that was never cut; each of the {RESUMED_AT} files has {in_bytes(sizes[0])}"
    )
