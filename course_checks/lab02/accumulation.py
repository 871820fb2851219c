"""Lab 2, exercise 2: gradient accumulation over a stream, whose labels can be counted only while it passes by."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_checks.harness import ATOL, RTOL, Contract, fresh_seed, named_seed, returned, same
from course_checks.lab02.common import lab

VOCAB, WIDTH, IGNORED = 48, 32, -100
Batch = tuple[torch.Tensor, torch.Tensor]
# largest norm; (rows, length, labels that count) of each micro-batch
CASES = (
    (100.0, ((4, 16, 61), (4, 16, 9), (2, 24, 20))),
    (100.0, ((2, 16, 30), (2, 16, 0), (3, 16, 5), (1, 16, 16))),
    (0.05, ((4, 16, 40), (2, 16, 3), (1, 32, 31))),
)
GRADIENT, LOSS = "the gradient that the optimizer sees", "the loss that your step returns"


class Tied(nn.Module):
    """A next-token model whose embedding and output share one weight; tokens (rows, length) to logits (…, VOCAB)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(tokens))))


def batches(case: tuple[tuple[int, int, int], ...], seed: int) -> list[Batch]:
    """Micro-batches of (tokens, labels); the labels that do not count are -100."""
    generator, made = torch.Generator().manual_seed(seed), []
    for rows, length, counted in case:
        tokens = torch.randint(VOCAB, (rows, length), generator=generator)
        labels = torch.randint(VOCAB, (rows, length), generator=generator)
        labels.view(-1)[torch.randperm(rows * length, generator=generator)[counted:]] = IGNORED
        made.append((tokens, labels))
    return made


def stream(micro_batches: list[Batch]) -> Iterator[Batch]:
    """One after another, in the same two buffers."""
    size = max(tokens.numel() for tokens, _ in micro_batches)
    buffers = torch.zeros(2, size, dtype=torch.long)
    for pair in micro_batches:
        for buffer, tensor in zip(buffers, pair, strict=True):
            buffer.data[: tensor.numel()] = tensor.flatten()  # .data: as a copy engine writes, past autograd's books
        rows, length = pair[0].shape
        yield tuple(buffer.data[: rows * length].view(rows, length) for buffer in buffers)
    buffers.zero_()


def counted(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())


# name -> the factor of a micro-batch's *summed* loss, from (that micro-batch, all of them)
WEIGHTS: dict[str, Callable[[Batch, list[Batch]], float]] = {
    "right": lambda one, every: 1 / sum(map(counted, every)),
    "mean of means": lambda one, every: 1 / max(1, counted(one)) / len(every),
    "sum of means": lambda one, every: 1 / max(1, counted(one)),
    "padding": lambda one, every: 1 / sum(b[1].numel() for b in every),
    "sum": lambda one, every: 1.0,
}
HINTS = {
    "that is a mean of means: a token of a micro-batch with few labels counts more than one of a full micro-batch": "mean of means",
    "the means are added up: sum losses instead, and divide once": "sum of means",
    "you divide by all positions; a label of -100 is no token of the loss": "padding",
    "that is the sum over all labels; divide it by their number": "sum",
    "clip what the optimizer will see: divide first": "late",
    "the norm of this gradient is not clipped": "never",
}


def gradients(model: nn.Module, micro_batches: list[Batch], way: str, max_norm: float) -> tuple[dict[str, Any], float]:
    """(gradients, loss) of all micro-batches at once; "late" clips the sum, and divides then; "never" does not clip."""
    model, weigh = copy.deepcopy(model), WEIGHTS[{"late": "sum", "never": "right"}.get(way, way)]
    losses = [
        cross_entropy(model(t).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
        for t, y in micro_batches
    ]
    loss = sum(weigh(b, micro_batches) * one for b, one in zip(micro_batches, losses, strict=True))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), math.inf if way == "never" else max_norm)
    factor = WEIGHTS["right"](micro_batches[0], micro_batches) if way == "late" else 1.0
    return {name: factor * p.grad for name, p in model.named_parameters()}, loss.item()


@lab.exercise("Accumulation over a stream", importance=5, difficulty=3, minutes=20)
def accumulated_step(step: Callable[..., Any]) -> str:
    """The clipped gradient of the big batch, though no two micro-batches are ever there at once."""
    seed = fresh_seed()
    with named_seed(seed):
        for max_norm, case in CASES:
            _right(step, batches(case, seed), max_norm)
    return "equal to the big batch for 3 streams, with labels from 0 to 61 a micro-batch; clipped after dividing"


def _right(step: Callable[..., Any], micro_batches: list[Batch], max_norm: float) -> None:
    torch.manual_seed(0)
    model = Tied()
    ways = {way: gradients(model, micro_batches, way, max_norm) for way in (*WEIGHTS, "late", "never")}
    right, right_loss = ways["right"]
    first_one, *others = model.parameters()
    groups = [{"params": [first_one]}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.0)  # the second step is the first again
    kept: list[dict[str, torch.Tensor]] = []
    passes: list[torch.Tensor | str] = []

    def forward(_: nn.Module, args: Any, logits: torch.Tensor) -> None:
        passes.append(args[0].clone())
        logits.register_hook(lambda _: passes.append("backward"))

    optimizer.register_step_pre_hook(
        lambda *_: kept.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    model.register_forward_hook(forward)
    loss = step(model, optimizer, stream(micro_batches), max_norm)
    first, seen = list(kept), list(passes)
    contract = Contract(about=f"micro-batches of {[*map(counted, micro_batches)]} labels, max_norm={max_norm}")
    contract.hints = {
        sentence: lambda f, way=way: f["clause"] == GRADIENT and same(f[GRADIENT], ways[way][0])
        for sentence, way in HINTS.items()
    } | {
        "it is a mean of means": lambda f: abs(f[LOSS] / ways["mean of means"][1] - 1) < 1e-4,
        "it is a sum": lambda f: abs(f[LOSS] / ways["sum"][1] - 1) < 1e-4,
    }
    contract.holds(len(first) == 1, f"the optimizer steps {len(first)} times in a step, not once")
    shown = [tokens for tokens, _ in micro_batches if any(torch.is_tensor(x) and torch.equal(x, tokens) for x in seen)]
    given = sum(counted(batch) > 0 for batch in micro_batches)  # one without labels may be left out
    lost = "a micro-batch is overwritten when the next one comes, and your model sees"
    contract.holds(len(shown) >= given, f"{lost} {len(shown)} of {len(micro_batches)} as they were")
    late = any(
        x == y == "backward" for x, y in zip(seen, seen[1:], strict=False) if isinstance(x, str) and isinstance(y, str)
    )
    contract.holds(
        not late,
        "backward() of a micro-batch must come before the next one: its tokens are overwritten, its graph waits",
    )
    runs = sum(map(torch.is_tensor, seen))
    contract.holds(runs <= len(micro_batches), f"the model runs {runs} times for {len(micro_batches)} micro-batches")
    contract.values(GRADIENT, first[0], right, rtol=RTOL, atol=ATOL)
    loss = returned(loss, (int, float), LOSS)
    contract.holds(loss == loss, f"{LOSS} is nan: the mean over no labels is 0 / 0, and a sum of none is 0")
    contract.values(LOSS, loss, right_loss, rtol=1e-4)
    step(model, optimizer, stream(micro_batches), max_norm)
    contract.holds(same(kept[1], right), "the first step is right, the second is not: are gradients of the first left?")
