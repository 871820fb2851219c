"""Lab 5, exercise 7: whole matrices for each rank, as Muon needs them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_checks.harness import Contract, fresh, fresh_seed, live_bytes, named_seed, run_ranks, settled_bytes
from course_checks.lab05.common import SLACK, flat, lab, sent_per_step
from course_lib.units import nice_bytes

STEPS, LR, MOMENTUM = 3, 0.02, 0.95
SHAPE, COUNT = (24, 36), 7  # matrices, which neither 2 nor 3 nor 4 ranks share evenly
KEPT, SENT = "what a rank keeps between steps", "a rank's traffic per step"
HINTS = {
    "the owners' own gradients are in the momentum, and not the ranks' mean": lambda f: f["like"]("own"),
    "a piece of a matrix was orthogonalized: each needs its whole matrix on one rank": lambda f: f["like"]("rows"),
    "a rank keeps the momentum of its own matrices alone": lambda f: f["clause"] == KEPT,
    "the gradient goes to its owner, and the new matrix comes back: twice a matrix in all": lambda f: (
        f["clause"] == SENT
    ),
}


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of a matrix close to 1, in five rounds (Jordan et al., 2024); a new matrix."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T).T
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def gradients(seed: int, step: int, rank: int) -> list[torch.Tensor]:
    return [fresh(SHAPE, seed + 100 * step + i, rank) for i in range(COUNT)]


def alone(weights: list[torch.Tensor], seed: int, slip: str = "") -> list[torch.Tensor]:
    """The weights after each step of one process, right or with a slip."""
    weights, momenta, after = copy.deepcopy(weights), [torch.zeros(SHAPE) for _ in range(COUNT)], []
    for step in range(STEPS):
        every = [gradients(seed, step, rank) for rank in range(dist.get_world_size())]
        for i, (weight, momentum) in enumerate(zip(weights, momenta, strict=True)):
            mean = every[i % len(every)][i] if slip == "own" else sum(each[i] for each in every) / len(every)
            momentum.mul_(MOMENTUM).add_(mean)
            pieces = momentum.chunk(dist.get_world_size()) if slip == "rows" else (momentum,)
            weight.sub_(LR * torch.cat([newton_schulz(piece) for piece in pieces]))
        after.append(flat(weights))
    return after


def on_a_rank(make: Callable[..., Any], seed: int) -> dict[str, Any]:
    gc.freeze()  # what the rank brought along need not be looked at
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights = [nn.Parameter(fresh(SHAPE, seed - 1 - i)) for i in range(COUNT)]
    slips = {slip: alone([w.detach() for w in weights], seed, slip) for slip in ("", "own", "rows")}
    before, most = live_bytes(), 4 * -(-COUNT // ranks) * SHAPE[0] * SHAPE[1] + SLACK
    optimizer, after = make(list(weights), LR, MOMENTUM), []
    dist.barrier()
    for step in range(STEPS):
        for weight, gradient in zip(weights, gradients(seed, step, rank), strict=True):
            weight.grad = gradient
        dist.barrier()
        optimizer.step()
        dist.barrier()
        for weight in weights:
            weight.grad = None
        gradient = None
        after.append(flat(weights))
        before += after[-1].nbytes
    return {"after": after, "slips": slips, "kept": settled_bytes(before + most) - before}


@lab.exercise("Stretch: whole matrices", importance=3, difficulty=4, minutes=20)
def muon(make: Callable[..., Any]) -> str:
    """One process's Muon, each rank with its matrices' momentum, and an all-reduce's bytes on the link."""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (2, 3, 4):
            run = run_ranks(on_a_rank, make, seed, ranks=ranks)
            matrix, most = 4 * SHAPE[0] * SHAPE[1], -(-COUNT // ranks)
            contract = Contract(HINTS)
            for rank, seen in enumerate(run.results):
                for step, expected in enumerate(seen["slips"][""]):
                    contract.about, got = f"rank {rank} of {ranks}, step {step + 1}", seen["after"][step]
                    contract.facts["like"] = lambda slip, s=step, g=got, f=seen: torch.allclose(
                        g, f["slips"][slip][s], 1e-3, 1e-4
                    )
                    contract.values("a weight", got, expected, rtol=1e-3, atol=1e-4)
            contract.about = f"{ranks} ranks"
            for seen in run.results:
                contract.memory(KEPT, seen["kept"], at_most=most * matrix + SLACK)
            sent = sent_per_step(run, ranks, STEPS)
            once = 2 * (ranks - 1) / ranks * matrix
            contract.memory(SENT, int(sent), at_least=0.98 * COUNT * once, at_most=ranks * most * once + SLACK)
    kept, sent = nice_bytes(run.results[0]["kept"]), nice_bytes(sent)
    return f"Muon of one process on 2, 3 and 4 ranks; of {COUNT} matrices one of 4 ranks keeps {kept} of momentum, and sends {sent}"
