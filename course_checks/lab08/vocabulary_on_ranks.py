"""What exercise 2's check runs on each rank, and what the known mistakes would give, computed without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from course_checks.harness import NotYet, nothing
from course_checks.lab08.common import SIZES, my_groups

TOKENS, VOCAB, IGNORED = 12, 40, -100
UPSTREAM = 0.3  # what backward() brings: the loss is rarely the last thing that is computed


class Case(NamedTuple):
    """One question: logits of that scale and offset, with ignored targets or without."""

    name: str
    scale: float
    offset: float
    ignored: int


CASES = (
    Case("small logits", 1.0, 0.0, 0),
    Case("with ignored targets", 1.0, 0.0, 5),
    Case("large logits", 60.0, 900.0, 3),
    Case("very negative logits", 20.0, -900.0, 0),
)


def question(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits (TOKENS, VOCAB) of the whole vocabulary, targets (TOKENS,))."""
    generator = torch.Generator().manual_seed(31 + seed)
    logits = torch.randn(TOKENS, VOCAB, generator=generator) * case.scale + case.offset
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[0], targets[1] = VOCAB - 1, 0  # the last column of the last rank, the first of the first
    targets[2 : 2 + case.ignored] = IGNORED
    return logits, targets


def answer(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient of the logits) of PyTorch's own cross-entropy, in fp64."""
    whole = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(whole, targets, ignore_index=IGNORED)
    (loss * UPSTREAM).backward()
    return loss.detach().float(), whole.grad.float()


def vocabulary_loss(loss_of: Callable[..., Any]) -> dict[int, list[dict[str, Any]]]:
    """The learner's loss and its backward in groups of 4, 2 and 1, with three barriers around each case."""
    groups = my_groups()
    return {size: [_one(loss_of, groups[size], size, case) for case in CASES] for size in SIZES}


def _one(loss_of: Callable[..., Any], group: Any, size: int, case: Case) -> dict[str, Any]:
    logits, targets = question(case, dist.get_rank() // size)
    local = logits.chunk(size, 1)[dist.get_rank(group)].clone().requires_grad_()
    dist.barrier()
    loss = loss_of(local, targets.clone(), group)
    if loss is None or loss is ...:
        raise nothing("the mean loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise NotYet(f"return the mean loss, one number, not {shown}")
    dist.barrier()
    if not loss.requires_grad:
        raise NotYet("no gradient flows from your loss to the logits: does it come out of .apply()?")
    (loss.reshape(()) * UPSTREAM).backward()
    dist.barrier()
    return {"loss": loss.detach().reshape(()), "gradient": local.grad}


# ------------------------------------------------------------------------------------------------- known mistakes
def mistaken_loss(logits: torch.Tensor, targets: torch.Tensor, ranks: int, rank: int, mistake: str) -> torch.Tensor:
    """The loss on `rank` of `ranks` with one mistake made, or none ("")."""
    size = VOCAB // ranks
    parts = logits.double().chunk(ranks, 1)
    own = parts[rank]
    peak = logits.double().amax(1)
    counted = targets != IGNORED
    tops = [part.amax(1) for part in parts]
    sums = [(part - peak[:, None]).exp().sum(1) for part in parts]
    if mistake == "own max":
        sums = [(part - top[:, None]).exp().sum(1) for part, top in zip(parts, tops, strict=True)]
        peak = tops[rank]
    total = sums[rank] if mistake == "own sum" else sum(sums)
    if mistake == "mean of sums":
        total = total / ranks
    at = targets.clamp(min=0)
    hit = logits.double().gather(1, at[:, None])[:, 0]
    if mistake == "own target":
        hit = torch.where((at // size) == rank, own.gather(1, (at % size)[:, None])[:, 0], 0.0)
    if mistake in ("no mask, modulo", "no mask, clamped"):
        places = [at % size if mistake.endswith("modulo") else (at - r * size).clamp(0, size - 1) for r in range(ranks)]
        hit = sum(part.gather(1, place[:, None])[:, 0] for part, place in zip(parts, places, strict=True))
    if mistake == "shifted":  # the target's logit as it is, the sum relative to the peak
        loss = total.log() - hit
    elif mistake == "peak subtracted twice":
        loss = total.log() - (hit - peak) + peak
    else:
        loss = total.log() + peak - hit
    loss = torch.where(counted, loss, 0.0)
    if mistake in ("kept", "kept, divided by the others", "column 0"):
        loss = total.log() + peak - torch.where(counted | (mistake == "column 0"), hit, 0.0)
    if mistake == "sum":
        return loss.sum()
    if mistake == "by ranks":
        return loss.sum() / counted.sum() / ranks
    if mistake == "times ranks":
        return loss.sum() / counted.sum() * ranks
    return loss.sum() / (len(loss) if mistake in ("all rows", "kept", "column 0") else counted.sum())


LOSSES = {
    "own max": "each rank subtracts the maximum of its own columns, and then the sums are of different scales: take the maximum "
    "over the ranks first (all_reduce with ReduceOp.MAX)",
    "own sum": "the sum of exponentials is over this rank's columns alone: add the ranks' sums up",
    "mean of sums": "the sums of exponentials are averaged over the ranks where they add up",
    "own target": "the logit of the target is on one rank only; on the others it is missing: add it up over the ranks",
    "no mask, modulo": "a rank that does not have the target's column adds a logit of some other column: a mask makes it 0 there",
    "no mask, clamped": "a rank that does not have the target's column adds a logit of some other column: a mask makes it 0 there",
    "shifted": "the maximum is subtracted inside the sum of exponentials and not from the target's logit, or never added again",
    "peak subtracted twice": "the maximum is added to the logarithm although the target's logit has it subtracted, too",
    "all rows": f"the mean divides by all rows, those with the target {IGNORED} too, which do not count",
    "kept": f"rows with the target {IGNORED} still have a loss: they do not count",
    "kept, divided by the others": f"rows with the target {IGNORED} still have a loss: they do not count",
    "column 0": f"rows with the target {IGNORED} are counted as if their target were column 0",
    "sum": "you return the sum over the rows where their mean is meant",
    "by ranks": "the loss is divided by the number of ranks: after the sums every rank has the same, whole loss",
    "times ranks": "the loss is added up over the ranks: after the sums every rank has the same, whole loss",
}


def mistaken_gradient(logits: torch.Tensor, targets: torch.Tensor, ranks: int, rank: int, mistake: str) -> torch.Tensor:
    """The gradient of the local logits on `rank` with one mistake made, or none ("")."""
    size, at, counted = VOCAB // ranks, targets.clamp(min=0), targets != IGNORED
    whole = logits.double().softmax(1)
    own = logits.double().chunk(ranks, 1)[rank]
    local = whole.chunk(ranks, 1)[rank].clone()
    if mistake == "own softmax":
        local = own.softmax(1)
    ones = torch.zeros(TOKENS, VOCAB, dtype=torch.float64).scatter(1, at[:, None], 1.0).chunk(ranks, 1)[rank].clone()
    if mistake == "everywhere":
        ones = torch.zeros_like(local).scatter(1, (at % size)[:, None], 1.0)
    if mistake == "everywhere, clamped":
        ones = torch.zeros_like(local).scatter(1, (at - rank * size).clamp(0, size - 1)[:, None], 1.0)
    if mistake == "no target":
        ones = torch.zeros_like(local)
    gradient = local - ones
    rows = TOKENS if mistake == "all rows" else counted.sum()
    if mistake != "ignored":
        gradient = gradient * counted[:, None]
    if mistake == "half ignored":
        gradient = torch.where(counted[:, None], gradient, local)
    if mistake == "not the mean":
        rows = 1
    gradient = gradient / rows * (1.0 if mistake == "upstream" else UPSTREAM)
    return gradient * {"times ranks": ranks, "by ranks": 1 / ranks, "sign": -1}.get(mistake, 1)


GRADIENTS = {
    "no target": "it is the softmax alone: subtract 1 in the target's column, on the rank that has it",
    "own softmax": "the softmax is taken over this rank's columns alone: divide by the sum over all ranks",
    "everywhere": "every rank subtracts 1 somewhere: only the rank that has the target's column may (the mask again)",
    "everywhere, clamped": "every rank subtracts 1 somewhere: only the rank that has the target's column may (the mask again)",
    "ignored": f"rows with the target {IGNORED} have a gradient: they do not count",
    "half ignored": f"rows with the target {IGNORED} still have their softmax as gradient: they do not count",
    "all rows": f"it divides by all rows, those with the target {IGNORED} too, which do not count",
    "not the mean": "it is that of the sum over the rows: the mean divides by their number",
    "upstream": "backward forgets the gradient that it is given (the loss is scaled on its way on): multiply by it",
    "times ranks": "it is added up over the ranks: the loss is one and the same on all of them, not n losses",
    "by ranks": "it is divided by the number of ranks",
    "sign": "it has the wrong sign: softmax minus one-hot",
}
