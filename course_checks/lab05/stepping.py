"""Lab 5, exercise 1: stage 2 in the open: gradients leave during backward, and each rank steps its share of the weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_checks.harness import (
    Contract,
    LiveTensors,
    bytes_behind_views,
    fresh_seed,
    live_bytes,
    named_seed,
    run_ranks,
    settled_bytes,
)
from course_checks.lab05.common import LENGTH, SLACK, VOCAB, Tied, flat, lab, next_token_loss, sent_per_step, trained
from course_lib.units import nice_bytes

STEPS, MICRO_BATCHES = 3, 2
CASES = (  # ranks, the optimizer, bytes of its state per element; a large eps, for Adam divides by tiny gradients
    (2, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}, 8),
    (3, torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01}, 4),
    (4, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-5}, 8),
)
BACKWARD, KEPT, SENT = "peak memory of backward()", "what a rank keeps between steps", "a rank's traffic per step"
SLIPS = {
    "own": "each rank stepped on its own gradients: nothing was summed over the ranks",
    "sum": "a reduce-scatter adds up; the gradient is the ranks' mean",
    "last": "only the last backward() counts: gradients of several add up, as they do in .grad",
    "old": "the gradients of earlier steps are still in there",
}
HINTS = {
    **{sentence: lambda f, slip=slip: f["like"](slip) for slip, sentence in SLIPS.items()},
    "this rank's share is right, the others' are as they were: gather them": lambda f: f["stale"] > 0.2,
    "let each gradient leave as soon as it is made, in a hook of its parameter": lambda f: f["clause"] == BACKWARD,
    "a view keeps the whole tensor behind it: clone() the share": lambda f: f["clause"] == KEPT and f["behind views"],
    "is a gradient still there, the state of all weights, or another copy?": lambda f: f["clause"] == KEPT,
    "an all-reduce sends twice what a reduce-scatter does": lambda f: f["clause"] == SENT and f["all_reduce"],
}


def micro_batches(seed: int, step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 100 * step + rank)
    return list(torch.randint(VOCAB, (MICRO_BATCHES, 3, LENGTH), generator=generator))


def alone(model: nn.Module, seed: int, optimizer_class: Any, settings: Any, slip: str = "") -> list[torch.Tensor]:
    """The trained weights after each step of one process that takes the rows of all ranks, right or with a slip."""
    twin, after = copy.deepcopy(model), []
    optimizer, ranks = optimizer_class(trained(twin), **settings), dist.get_world_size()
    for step in range(STEPS):
        if slip != "old":
            optimizer.zero_grad()
        for rank in [dist.get_rank()] if slip == "own" else range(ranks):
            for batch in micro_batches(seed, step, rank)[-1 if slip == "last" else 0 :]:
                loss = next_token_loss(twin, batch) / MICRO_BATCHES
                (loss / (1 if slip in ("own", "sum") else ranks)).backward()
        optimizer.step()
        after.append(flat(trained(twin)))
    return after


def worst_of_backward(losses: Iterable[torch.Tensor]) -> int:
    """Most bytes that came into being and were alive at once in a backward."""
    worst = 0
    for loss in losses:
        with LiveTensors(every=True) as live:
            loss.backward()
        worst = max(worst, live.highest)
    return worst


def on_a_rank(
    make: Callable[..., Any], optimizer_class: Any, settings: Any, per_element: int, seed: int
) -> dict[str, Any]:
    gc.freeze()  # what the rank brought along need not be looked at
    torch.manual_seed(seed)
    model, rank = Tied(), dist.get_rank()
    slips = {slip: alone(model, seed, optimizer_class, settings, slip) for slip in ("", *SLIPS)}
    twin = copy.deepcopy(model)
    for p in trained(twin):
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    floor = worst_of_backward(next_token_loss(twin, b) / MICRO_BATCHES for b in micro_batches(seed, 0, rank))
    del twin
    frozen, after = flat(model.frozen.parameters()), [flat(trained(model))]
    shares = sum(-(-p.numel() // dist.get_world_size()) for p in trained(model))
    before, limit = live_bytes(), per_element * shares + SLACK
    optimizer = make(list(model.parameters()), optimizer_class, **settings)
    dist.barrier()
    seen: dict[str, Any] = {"slips": slips, "backward": 0}
    for step in range(STEPS):
        losses = (next_token_loss(model, batch) / MICRO_BATCHES for batch in micro_batches(seed, step, rank))
        seen["backward"] = max(seen["backward"], worst_of_backward(losses) - floor)
        seen["left"] = [name for name, p in model.named_parameters() if p.grad is not None]
        dist.barrier()
        optimizer.step()
        dist.barrier()
        after.append(flat(trained(model)))
        before += after[-1].nbytes
    seen["kept"], seen["limit"] = settled_bytes(before + limit) - before, limit
    seen["behind views"] = bytes_behind_views([*model.parameters(), *after], 1000)
    return seen | {"after": after, "frozen": torch.equal(frozen, flat(model.frozen.parameters()))}


@lab.exercise("One sharded step", importance=5, difficulty=4, minutes=30)
def sharded_step(make: Callable[..., Any]) -> str:
    """One process's weights; what backward adds, what is kept and what is sent are a rank's share."""
    seed = fresh_seed()
    sizes = [p.numel() for p in trained(Tied())]
    with named_seed(seed):
        for ranks, optimizer_class, settings, state in CASES:
            name = f"{optimizer_class.__name__} on {ranks} ranks"
            run = run_ranks(on_a_rank, make, optimizer_class, settings, state + 4, seed, ranks=ranks)
            shares, largest = sum(-(-size // ranks) for size in sizes), max(sizes) + ranks
            for rank, seen in enumerate(run.results):
                contract = Contract(HINTS, about=name)
                contract.holds(
                    not seen["left"], f"after backward() there is a .grad left, {' '.join(seen['left'][:1])}"
                )
                _right_weights(contract, seen, rank)
                contract.facts |= {"like": lambda _: False, "stale": 0, "behind views": seen["behind views"]}
                contract.memory(BACKWARD, seen["backward"], at_most=4 * shares + 8 * largest + SLACK)
                contract.memory(KEPT, seen["kept"], at_least=state * shares // 2, at_most=seen["limit"])
            contract.facts["all_reduce"] = any(c.kind == "all_reduce" for c in run.collectives)
            sent = sent_per_step(run, ranks, STEPS)
            once = 4 * (ranks - 1) / ranks * sum(sizes)
            padded = 4 * (ranks - 1) * shares
            times = MICRO_BATCHES + 1  # gradients of each backward, weights once
            contract.memory(SENT, int(sent), at_least=0.98 * times * once, at_most=times * padded + SLACK)
    backward, kept, traffic = (nice_bytes(count) for count in (seen["backward"], seen["kept"], sent))
    return (
        f"AdamW and SGD on 2, 3 and 4 ranks: weights of one process. With AdamW on 4 ranks backward() adds {backward}, "
        f"{kept} stay between steps, and a rank sends {traffic} per step"
    )


def _right_weights(contract: Contract, seen: dict[str, Any], rank: int) -> None:
    name = contract.about
    contract.holds(seen["frozen"], "the frozen layer moved")
    for step, expected in enumerate(seen["slips"][""]):
        contract.about, got, old = f"{name}, rank {rank}, step {step + 1}", seen["after"][step + 1], seen["after"][step]
        contract.holds(not torch.equal(got, old), "no weight of the model has changed")
        still = (got == old) & (expected != old)
        contract.facts["stale"] = (
            still.double().mean().item() if torch.allclose(got[~still], expected[~still], 1e-3, 1e-5) else 0
        )
        contract.facts["like"] = lambda slip, s=step, g=got: torch.allclose(g, seen["slips"][slip][s], 1e-3, 1e-5)
        contract.values("a weight", got, expected, rtol=2e-4, atol=5e-6)
    contract.about = name
