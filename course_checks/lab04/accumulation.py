"""Lab 4, exercises 1 and 6: one optimizer step over micro-batches of unequal token counts, which communicates once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed, number, on_link, phases, run_ranks
from course_checks.lab04.common import IGNORED, SLACK, Batch, Tagger, flat, lab, micro_batch

STEPS, LR, GRADIENT, SENT = 2, 0.3, "the gradient at the optimizer's step", "what rank 0 sends in a step"
# For each rank, its micro-batches as (rows, length, labels that count). All ranks have equally many labels.
EQUAL = (
    ([(3, 8, 24), (2, 10, 7)], [(2, 8, 3), (4, 8, 28)]),
    (
        [(4, 8, 20), (2, 12, 1), (3, 8, 0)],
        [(1, 6, 2), (4, 10, 19)],
        [(3, 8, 21)],
    ),  # rank 0's last one counts for nothing
)
HINTS = {
    "only this rank's gradients are in it: in the last micro-batch they must travel": lambda f: f["like"](
        "own", scaled=True
    ),
    "that is the mean of the micro-batches' means: weigh each by its labels": lambda f: f["like"]("mean of means"),
    "each rank divides by its own labels: divide by the labels of all ranks": lambda f: f["like"]("each rank's mean"),
    "it is a multiple of the right one: DDP divides the ranks' sum by their number": lambda f: f["like"](
        "gradient", scaled=True
    ),
    "the first step was right: are its gradients still there?": lambda f: f["step"] > 0,
    "return the mean over the labels of all ranks": lambda f: f["clause"] == "the loss",
    "no_sync() goes around forward and backward of all micro-batches but the last: DDP decides in forward": lambda f: (
        f["clause"] == SENT
    ),
}


def expected_of(model: nn.Module, by_rank: Sequence[Sequence[Batch]]) -> dict[str, Any]:
    """Gradient and loss of all ranks' labels in one process, and what known mistakes give in their place."""
    sums, counts, loss = [], [], 0.0
    for batches in by_rank:
        sums.append([]), counts.append([])
        for tokens, labels in batches:
            model.zero_grad()
            summed = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            summed.backward()
            loss += summed.item()
            sums[-1].append(flat(model.parameters()))
            counts[-1].append(int((labels != IGNORED).sum()))
    ranks, total = len(by_rank), sum(map(sum, counts))
    means = [[g / max(c, 1) for g, c in zip(*pair, strict=True)] for pair in zip(sums, counts, strict=True)]
    return {
        "gradient": sum(map(sum, sums)) / total,
        "loss": loss / total,
        "mean of means": sum(sum(m) / len(m) for m in means) / ranks,
        "each rank's mean": sum(sum(g) / max(sum(c), 1) for g, c in zip(sums, counts, strict=True)) / ranks,
        "own": [sum(g) for g in sums],
    }


def on_a_rank(step: Callable[..., Any], case: Any, seed: int) -> list[dict[str, Any]]:
    """Steps under DDP, each beside what one process gets at the same weights."""
    torch.manual_seed(seed)
    model, rank, seen = Tagger(), dist.get_rank(), []
    twin, wrapped = copy.deepcopy(model), DistributedDataParallel(model)
    optimizer, gradients, tokens_at_once = torch.optim.SGD(model.parameters(), lr=LR), [], []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(flat(model.parameters())))

    def ends(module: nn.Module, args: Any, logits: torch.Tensor) -> None:
        if logits.requires_grad:
            logits.register_hook(lambda _: tokens_at_once.append(0))  # its backward

    model.embedding.register_forward_pre_hook(lambda _, args: tokens_at_once.append(args[0].numel()))
    model.out.register_forward_hook(ends)
    for number_of_step in range(STEPS):
        generator = torch.Generator().manual_seed(seed + number_of_step)
        by_rank = [[micro_batch(*sizes, generator) for sizes in rank_sizes] for rank_sizes in case]
        twin.load_state_dict(model.state_dict())
        expected = expected_of(twin, by_rank)
        gradients.clear(), tokens_at_once.clear()
        dist.barrier()
        given = [(tokens.clone(), labels.clone()) for tokens, labels in by_rank[rank]]
        loss = step(wrapped, optimizer, given)
        with torch.no_grad():
            right = torch.nn.utils.parameters_to_vector(p for p in twin.parameters() if p.requires_grad)
            right -= LR * expected["gradient"]
            now = torch.nn.utils.parameters_to_vector(p for p in model.parameters() if p.requires_grad)
        seen.append(
            {
                "expected": expected,
                "gradients": list(gradients),
                "events": list(tokens_at_once),
                "loss": loss,
                "off": float((now - right).abs().max()),
            }
        )
    return seen


def check(step: Callable[..., Any], cases: Sequence[Any]) -> str:
    seed = fresh_seed()
    with named_seed(seed):
        for case in cases:
            ranks = len(case)
            try:
                run = run_ranks(on_a_rank, step, case, seed, ranks=ranks)
            except NotYet as error:
                raise NotYet(
                    f"{error}. Does a rank skip a micro-batch that has no label? The last one must run"
                ) from None
            for n in range(STEPS):
                for rank, seen in enumerate(run.results):
                    _right(seen[n], case[rank], f"rank {rank} of {ranks}, step {n + 1}", rank, n)
            contract = Contract(HINTS, {"step": 0}, about=f"equal to one process on {ranks} ranks")
            total = 2 * (ranks - 1) / ranks * 4 * sum(p.numel() for p in Tagger().parameters() if p.requires_grad)
            sent = sum(on_link(c) for phase in phases(run, 0)[1:] for c in phase) / STEPS
            contract.memory(SENT, int(sent), at_least=0.99 * total, at_most=total + SLACK)
    return contract.evidence()


def _right(seen: dict[str, Any], sizes: Sequence[tuple[int, int, int]], about: str, rank: int, step: int) -> None:
    expected, events, steps = seen["expected"], seen["events"], seen["gradients"]

    def like(name: str, *, scaled: bool = False) -> bool:
        if contract.facts["clause"] != GRADIENT:
            return False
        wrong = expected[name][rank] if name == "own" else expected[name]
        factor = float(steps[0] @ wrong / (wrong @ wrong)) if scaled else 1.0
        return bool(factor) and torch.allclose(steps[0], factor * wrong, rtol=1e-3, atol=1e-6)

    contract = Contract(HINTS, {"step": step, "like": like}, about)
    contract.holds(len(steps) == 1, f"the optimizer steps {len(steps)} times, and should once")
    largest = max(rows * length for rows, length, _ in sizes)
    at_once = f"{max(events, default=0)} tokens go through the model at once, and the largest micro-batch has {largest}"
    contract.holds(max(events, default=0) <= largest, at_once)
    turns = all(bool(one) != bool(other) for one, other in zip(events, events[1:], strict=False))
    contract.holds(
        turns and events.count(0) == len(events) / 2, "each forward pass is to be followed by its backward()"
    )
    contract.values(GRADIENT, steps[0], expected["gradient"], rtol=1e-3, atol=1e-6)
    contract.holds(
        seen["off"] < 1e-4, f"after the step a weight is {seen['off']:.2g} off: only the optimizer changes them"
    )
    contract.values("the loss", number(seen["loss"], "the loss that you return"), expected["loss"], rtol=1e-3)


@lab.exercise("Accumulate, and communicate once", importance=5, difficulty=3, minutes=20)
def accumulated_step(step: Callable[..., Any]) -> str:
    """The gradient of all labels of equally loaded ranks, micro-batch by micro-batch, sent once a step."""
    return check(step, EQUAL)
