"""Lab 6, exercise 6: the norm of gradients that no rank has in whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import NotYet, close, phases, returned, run_ranks
from course_checks.lab06.common import chunk_rows, lab
from course_lib.launch import Run

# a 10x5 weight on 3 ranks leaves 4, 4 and 2 rows; 5 rows on 4 ranks leave 2, 2, 1 and none
WIDTHS = (6, 10, 5, 2)
MAX_NORMS = (0.05, 1e6)  # one that clips, one that must change nothing
MESHES: dict[int, tuple[int, int]] = {2: (1, 2), 3: (1, 3), 4: (2, 2), 1: (1, 1)}  # ranks -> replicate x shard


@lab.exercise("Clipping what is sharded", importance=4, difficulty=3, minutes=20)
def clip_sharded(clip: Callable[..., Any]) -> str:
    """The norm and the clipped gradients of one rank, on 1, 2, 3 ranks and a 2x2 mesh, with one small all-reduce."""
    shown = ""
    for ranks, (replicate, shard) in MESHES.items():
        run = run_ranks(_clip, clip, replicate, shard, ranks=ranks)
        for at, _ in enumerate(MAX_NORMS):
            _right_norms([told[at] for told in run.results], replicate, shard)
            _right_gradients([told[at] for told in run.results], replicate, shard)
        if shard > 1:
            sent = [_one_all_reduce(run, rank) for rank in range(ranks)][0]
            shown = f"norm {run.results[0][0]['norm']:.6f} by one all-reduce of {sent} bytes"
    return f"equal to one rank's on 1, 2 and 3 ranks with uneven and empty shards and on a 2x2 mesh; {shown}"


def _clip(clip: Callable[..., Any], replicate: int, shard: int) -> list[dict[str, Any]]:
    """Gradients of a real fully_shard model, clipped by the learner; what one rank with the whole model would get."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)))

    ranks, rank = replicate * shard, dist.get_rank()
    grid = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
    mesh = grid if replicate > 1 else grid["shard"]
    rows = torch.randn(4 * ranks, WIDTHS[0], generator=torch.Generator().manual_seed(9))
    told = []
    for max_norm in MAX_NORMS:
        twin, model = build(), fully_shard(build(), mesh=mesh)
        twin(rows).square().mean().backward()
        model(rows[4 * rank : 4 * (rank + 1)]).square().mean().backward()
        local = [p.grad.to_local() for p in model.parameters()]
        own = torch.cat([g.flatten() for g in local]).norm().item()
        whole = [p.grad.norm().item() for p in twin.parameters()]
        dist.barrier()
        norm = clip(local, max_norm, mesh)
        dist.barrier()
        if isinstance(norm, torch.Tensor) and norm.numel() == 1:
            norm = norm.item()
        norm = returned(norm, (int, float), "the norm, one number,")
        expected_norm = float(nn.utils.clip_grad_norm_(twin.parameters(), max_norm))
        off = [
            _off(p.grad.to_local(), q.grad, mesh) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
        ]
        told.append(
            {
                "norm": float(norm),
                "expected": expected_norm,
                "own": own,
                "max_norm": max_norm,
                "off": max(off),
                "whole": whole,
                "got": float(torch.cat([g.flatten() for g in local]).norm()),
            }
        )
    return told


def _off(mine: torch.Tensor, whole: torch.Tensor, mesh: Any) -> float:
    """Largest difference between this rank's rows of a gradient and those that it should have."""
    rows = chunk_rows(len(whole), mesh.size(-1), mesh.get_local_rank(-1) if mesh.ndim > 1 else mesh.get_local_rank())
    expected = whole[rows.start : rows.stop]
    return float((mine - expected).abs().max()) if expected.numel() else 0.0


def _right_norms(told: list[dict[str, Any]], replicate: int, shard: int) -> None:
    norms, expected, where = [t["norm"] for t in told], told[0]["expected"], f"on {replicate}x{shard} ranks"
    near = {
        replicate
        ** 0.5: f"{where} your norm is sqrt({replicate}) times too large: the replicas hold the same gradients, and "
        'you counted each of them. Reduce over the shard group alone, mesh.get_group("shard")',
        shard**-0.5: f"{where} your norm is sqrt({shard}) times too small: you averaged the squares where they add up",
        expected: f"{where} your norm is the square of the norm: take the root once the sum is complete",
    }
    for factor, words in near.items():
        if abs(factor - 1) > 1e-3 and all(abs(n / expected / factor - 1) < 1e-3 for n in norms):
            raise NotYet(words)
    own = [t["own"] for t in told[:shard]]  # of the ranks of one replica
    if max(norms) - min(norms) > 1e-4 * expected:
        raise NotYet(
            f"{where} the ranks return different norms ({', '.join(f'{n:.5f}' for n in norms[:4])}; one rank with the whole "
            f"model: {expected:.5f}): each took the norm of its own shards, and so each would clip otherwise"
        )
    if shard > 1 and abs(norms[0] - sum(own)) < 1e-3 * expected:
        raise NotYet(
            f"{where} your norm is the sum of the ranks' norms: sum the squares over the ranks, then take the root"
        )
    if abs(norms[0] - sum(told[0]["whole"])) < 1e-3 * expected:
        raise NotYet(f"{where} your norm is the sum of the parameters' norms: sum squares, and take the root once")
    if shard > 1 and abs(norms[0] - max(own)) < 1e-3 * expected:
        raise NotYet(f"{where} your norm is that of the rank with the largest: squares add up over the ranks")
    for rank, norm in enumerate(norms):
        close(norm, expected, rtol=1e-3, what=f"rank {rank} {where}: the norm that you return")


def _right_gradients(told: list[dict[str, Any]], replicate: int, shard: int) -> None:
    for rank, each in enumerate(told):
        if each["off"] <= 1e-4 * each["expected"] * min(1.0, each["max_norm"] / each["expected"]) + 1e-7:
            continue
        where = f"rank {rank} on {replicate}x{shard} ranks"
        if each["max_norm"] > each["expected"]:
            raise NotYet(
                f"{where}: a norm of {each['expected']:.4g} is below max_norm {each['max_norm']:g}, and the gradients changed: "
                "multiply by no more than 1"
            )
        if abs(each["got"] - each["own"]) < 1e-4 * each["own"]:
            raise NotYet(f"{where}: the gradients are as they were: scale them in place (mul_), every one")
        if abs(each["got"] / each["own"] - each["max_norm"] / each["own"]) < 1e-3 * each["max_norm"] / each["own"]:
            raise NotYet(
                f"{where}: its own gradients now have the norm {each['max_norm']:g}; all ranks' together should"
            )
        raise NotYet(
            f"{where}: the clipped gradients differ from one rank's by {each['off']:.3g}; scale by max_norm / norm, the same "
            "on every rank"
        )


def _one_all_reduce(run: Run, rank: int) -> int:
    calls = phases(run, rank)[1]
    if len(calls) > 1:
        raise NotYet(
            f"{len(calls)} collectives for one norm ({', '.join(sorted({c.kind for c in calls}))}): each pays the latency. Add "
            "up this rank's squares first, then all-reduce one number"
        )
    if not calls:
        raise NotYet("no collective at all: a rank knows its own shards alone")
    [call] = calls
    if call.kind != "all_reduce" or call.bytes > 8:
        raise NotYet(f"one {call.kind} of {call.bytes:,} bytes: all that the ranks have to share is one number")
    return call.bytes
