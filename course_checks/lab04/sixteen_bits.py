"""Lab 4, exercise 2: a communication hook with sixteen bits on the link and thirty-two in the sum."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed, on_link, phases, run_ranks
from course_checks.lab04.common import Tagger, flat, lab, micro_batch

STEPS, BUCKET, LR = 4, 3000, 0.3
ROUNDING = 2.0**-8 * 1.02  # half of bf16's last place, relative
SENT = "what rank 0 sends in a step"
HINTS = {
    "that is the ranks' sum: with a hook, DDP no longer divides": lambda f: f["near"](f["ranks"]),
    "these are the rank's own gradients": lambda f: f["own"],
    "is the sum rounded, too? Receive what all ranks have of your piece, and add it up in fp32": lambda f: f["near"](1),
    "send each rank only its piece of what you hold, and everybody only the mean of your own, both in bf16": lambda f: (
        f["clause"] == SENT
    ),
}


def on_a_rank(hook: Callable[..., Any], seed: int) -> list[dict[str, Any]]:
    """Each step's gradient as DDP leaves it, the rank's own, and the loss before it."""
    torch.manual_seed(seed)
    model, seen, generator = Tagger(), [], torch.Generator().manual_seed(seed + dist.get_rank())
    twin, wrapped = copy.deepcopy(model), DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)

    def watched(state: Any, bucket: dist.GradBucket) -> Any:
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # get_future() gives this base class
            raise NotYet(
                f"a hook returns a torch.futures.Future of the averaged buffer, and yours {type(future).__name__}"
            )
        return future

    watched.__annotations__ = {}  # DDP checks those that it finds
    wrapped.register_comm_hook(None, watched)
    tokens, labels = micro_batch(4, 12, 40, generator)
    for step in range(STEPS):
        twin.load_state_dict(model.state_dict())
        for each in (wrapped, twin):
            each.zero_grad()
            loss = cross_entropy(each(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
        seen.append({"mean": flat(model.parameters()), "own": flat(twin.parameters()), "loss": loss.item()})
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.requires_grad):
                p -= LR * p.grad
        if step == 0:
            dist.barrier()  # after it, DDP has its final buckets
    return seen


@lab.exercise("Sixteen bits on the link", importance=4, difficulty=4, minutes=25)
def sixteen_bit_hook(hook: Callable[..., Any]) -> str:
    """The bytes of an all-reduce in bf16; each number rounded before it is sent and once as the mean, not in the sum."""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (3, 4):
            run = run_ranks(on_a_rank, hook, seed, ranks=ranks)
            for rank, steps in enumerate(run.results):
                for step, seen in enumerate(steps):
                    same = torch.equal(seen["mean"], run.results[0][step]["mean"])
                    Contract(about=f"{ranks} ranks").holds(same, f"ranks 0 and {rank} end up with different gradients")
                    mine = [other[step]["own"] for other in run.results]
                    _rounded_twice(seen, mine, f"rank {rank} of {ranks}, step {step + 1}")
            sent = sum(on_link(c) for phase in phases(run, 0)[1:] for c in phase) / (STEPS - 1)
            numbers = len(run.results[0][0]["own"])
            least, contract = 2 * (ranks - 1) / ranks * 2 * numbers, Contract(HINTS, about=f"{ranks} ranks")
            contract.facts |= {"near": lambda _: False, "own": False}
            padding = 64 * ranks  # bytes: buckets need not divide
            contract.memory(SENT, int(sent), at_least=0.98 * least, at_most=1.01 * least + padding)
            first, last = (sum(steps[i]["loss"] for steps in run.results) / ranks for i in (0, -1))
            contract.holds(last < first, f"the loss rises, from {first:.3f} to {last:.3f}")
            contract.say(f"{2 * least:,.0f} in fp32; the loss falls from {first:.3f} to {last:.3f}")
    return contract.evidence()


def _rounded_twice(seen: dict[str, Any], mine: list[torch.Tensor], about: str) -> None:
    got, mean, ranks = seen["mean"], sum(mine) / len(mine), len(mine)
    contract = Contract(HINTS, {"ranks": ranks}, about)
    contract.facts["near"] = lambda factor: (got - factor * mean).norm() < 0.05 * (factor * mean).norm()
    contract.facts["own"] = torch.allclose(got, seen["own"], rtol=1e-2, atol=1e-6)
    sent = [  # whoever divides first rounds another number, as well as this one
        sum(g.float().bfloat16().double() for g in mine) / ranks,
        sum((g.float() / ranks).bfloat16().double() for g in mine),
    ]
    off = [((got - target).abs() > ROUNDING * target.abs() + 1e-9).double().mean().item() for target in sent]
    contract.holds(
        min(off) == 0, f"{min(off):.0%} of the numbers are further off than what is sent and the mean may round"
    )
