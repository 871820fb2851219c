"""Lab 6, exercise 4: the norm of gradients that no rank has in whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_checks.harness import Contract, fresh_seed, named_seed, number, run_ranks
from course_checks.lab06.common import chunk_rows, lab
from course_lib.observe.collectives import record_collectives

# replicas, ranks that share a replica, widths of the model; of 4 ranks that share 3 rows and 2 the last has none at all
CASES = ((2, 2, (7, 9, 5, 1)), (1, 4, (6, 3, 2, 3)))
# max_norm, times the norm: one is below every rank's own norm, so all must scale; one must change nothing
BELOW, ABOVE = 0.02, 3.0
NORM, CLIPPED = "the norm", "a clipped gradient"
SLIPS = {
    "sum": "it is the sum of the ranks' norms: add up squares, and take the root at the end",
    "largest": "it is the norm of the rank with the largest: squares add up over the ranks",
    "shards": "it is the sum of the shards' norms: add up squares, and take the root at the end",
    "square": "it is the square of the norm: take the root when the sum is complete",
    "own": "it is the norm of this rank's shards alone",
    "mean": "squares add up over the ranks, and you averaged them",
    "replicas": 'replicas hold the same gradients, and each was counted: reduce over mesh.get_group("shard") alone',
}
HINTS = {
    **{sentence: lambda f, slip=slip: f["clause"] == NORM and f["near"](slip) for slip, sentence in SLIPS.items()},
    "scale every gradient in place": lambda f: f["clause"] == CLIPPED and f["untouched"],
    "the norm is below max_norm: multiply by no more than 1": lambda f: f["clause"] == CLIPPED and f["times"] > 1,
    "this rank's shards alone now have the norm max_norm; all ranks' together should": lambda f: (
        f["clause"] == CLIPPED and abs(f["own norm"] / f["max_norm"] - 1) < 1e-3
    ),
    "a rank has one number to share: add up its squares first": lambda f: f["clause"] == "traffic",
}


def norm_of(gradients: list[torch.Tensor]) -> float:
    return nn.utils.get_total_norm(gradients).item()


def on_a_rank(clip: Callable[..., Any], seed: int) -> list[float]:
    """The norm of each case."""
    return [right_norm(clip, *case, seed) for case in CASES]


def right_norm(clip: Callable[..., Any], replicate: int, shard: int, widths: tuple[int, ...], seed: int) -> float:
    """Clip the gradients of a real fully_shard model; what one process with the whole model would have."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    grid = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
    mesh = grid if replicate > 1 else grid["shard"]
    for times in (BELOW, ABOVE):
        torch.manual_seed(seed)
        twin = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)])
        model, data = fully_shard(copy.deepcopy(twin), mesh=mesh), torch.randn(4 * ranks, widths[0])
        (10 * twin(data).square().mean()).backward()
        (10 * model(data.chunk(ranks)[rank]).square().mean()).backward()
        whole, local = [p.grad for p in twin.parameters()], [p.grad.to_local() for p in model.parameters()]
        shares = [[g[list(chunk_rows(len(g), shard, r))] for g in whole] for r in range(shard)]
        norm, before, norms = norm_of(whole), [g.clone() for g in local], [norm_of(share) for share in shares]
        about = f"rank {rank} of a mesh of {replicate} x {shard}, whose norm is {norm:.4f}"
        contract = Contract(HINTS, {"times": times, "max_norm": times * norm}, f"{about}, max_norm {times * norm:.4f}")
        with record_collectives() as calls:
            yours = clip(list(local), times * norm, mesh)
        slips = {"sum": sum(norms), "largest": max(norms) * bool(calls), "own": norm_of(before), "square": norm**2}
        slips |= {"shards": sum(g.norm().item() for share in shares for g in share)}
        slips |= {"mean": norm / shard**0.5, "replicas": norm * replicate**0.5}
        sentence = (
            "it has no elements and calls nothing, and the others wait for it: every rank must make the same calls"
        )
        contract.holds(bool(calls) or any(g.numel() for g in local), sentence)
        contract.facts["near"] = lambda slip, yours=yours, slips=slips: abs(yours / slips[slip] - 1) < 1e-4
        contract.values(NORM, number(yours, NORM), norm, rtol=1e-4)
        contract.facts |= {"untouched": all(map(torch.equal, local, before)), "own norm": norm_of(local)}
        for gradient, right in zip(local, shares[rank % shard], strict=True):
            contract.values(CLIPPED, gradient, min(1, times) * right, rtol=1e-3, atol=1e-6)
        sent = ", ".join(f"{call.kind} of {call.bytes} bytes" for call in calls)
        small = len(calls) == 1 and calls[0].kind == "all_reduce" and 4 <= calls[0].bytes <= 8
        contract.holds(small, f"one all_reduce of one number is enough, and you call {sent}", "traffic")
    return norm


@lab.exercise("Clipping what is sharded", importance=4, difficulty=2, minutes=10)
def clip_sharded(clip: Callable[..., Any]) -> str:
    """The norm and the clipped gradients of one process, with one small all-reduce on every rank."""
    seed = fresh_seed()
    with named_seed(seed):
        norms = run_ranks(on_a_rank, clip, seed, ranks=4).results[0]
    cases = zip(norms, CASES, strict=True)
    shown = " and ".join(f"{norm:.4f} on {replicate} x {shard}" for norm, (replicate, shard, _) in cases)
    return f"one process's norm and gradients: {shown} ranks; one all-reduce of one number, also from a rank without elements"
