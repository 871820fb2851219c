"""Lab 2, exercise 1: gradient accumulation where the micro-batches count unequally many tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_checks.harness import ATOL, RTOL, NotYet, close, returned
from course_checks.lab02.common import lab
from course_lib.observe.memory import SavedForBackward

VOCAB, WIDTH, IGNORED = 48, 32, -100
Batch = tuple[torch.Tensor, torch.Tensor]
# (rows, length, labels that count) of each micro-batch; the last case has one in which no label counts
CASES = (
    ((4, 16, 64), (4, 16, 64)),
    ((4, 16, 61), (4, 16, 9), (2, 24, 20)),
    ((2, 16, 30), (2, 16, 0), (3, 16, 5), (1, 16, 16)),
)


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


def batches(case: tuple[tuple[int, int, int], ...]) -> list[Batch]:
    """Micro-batches of (tokens, labels); the labels that do not count are -100."""
    generator, made = torch.Generator().manual_seed(3), []
    for rows, length, counted in case:
        tokens = torch.randint(VOCAB, (rows, length), generator=generator)
        labels = torch.randint(VOCAB, (rows, length), generator=generator)
        labels.view(-1)[torch.randperm(rows * length, generator=generator)[counted:]] = IGNORED
        made.append((tokens, labels))
    return made


@lab.exercise("Accumulation with unequal token counts", importance=5, difficulty=3, minutes=20)
def accumulated_step(step: Callable[..., Any]) -> str:
    """The gradient of the big batch, whatever the micro-batches hold, and never more than one micro-batch's graph."""
    for case in CASES:
        told = _run(step, batches(case))
        _right_step(told, case)
        _one_graph_at_a_time(told, len(case))
    return (
        "equal to the big batch for micro-batches of 61, 9 and 20 counted tokens, and for one that counts none; at most "
        f"{told['highest']:,} bytes kept for backward, where {told['largest']:,} is one micro-batch's need"
    )


def _run(step: Callable[..., Any], micro_batches: list[Batch]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tied()
    # Sums over the counted tokens, one optimizer step: what each way to weigh the micro-batches would give.
    ways = {name: _gradients(copy.deepcopy(model), micro_batches, name) for name in WEIGHTS}
    book = SavedForBackward(model)
    with book:
        for tokens, labels in micro_batches:
            _sum_loss(model, tokens, labels).backward()
    largest = book.highest  # each graph is gone before the next is built
    model.zero_grad()
    optimizer, kept, calls = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    optimizer.register_step_pre_hook(
        lambda *_: kept.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    book = SavedForBackward(model)
    with book:
        loss = step(model, optimizer, micro_batches)
    handle.remove()
    first, left = list(kept), False
    if len(first) == 1:  # a second step shows whether gradients are left over, wherever the learner's code zeroes them
        right = _gradients(copy.deepcopy(model), micro_batches, "right")["gradients"]
        step(model, optimizer, micro_batches)
        left = len(kept) < 2 or not _same(kept[1], right)
    return {
        "loss": loss,
        "kept": first,
        "ways": ways,
        "left": left,
        "calls": len(calls),
        "highest": book.highest,
        "largest": largest,
    }


def _sum_loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _counted(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())


# name -> the factor of a micro-batch's *summed* loss, from (that micro-batch, all of them)
WEIGHTS: dict[str, Callable[[Batch, list[Batch]], float]] = {
    "right": lambda one, every: 1 / sum(map(_counted, every)),
    "mean of means": lambda one, every: 1 / _counted(one) / len(every) if _counted(one) else 0.0,
    "sum of means": lambda one, every: 1 / _counted(one) if _counted(one) else 0.0,
    "by rows": lambda one, every: len(one[0]) / sum(len(b[0]) for b in every) / max(1, _counted(one)),
    "padding counts": lambda one, every: 1 / sum(b[1].numel() for b in every),
    "sum": lambda one, every: 1.0,
}
SENTENCES = {
    "mean of means": "that is a mean of means: a token of a micro-batch with few labels counts more than one of a full "
    "micro-batch. Divide each summed loss by the labels of the whole step",
    "sum of means": "the micro-batches' means are added up, and their weights are missing: divide each summed loss by the "
    "labels of the whole step",
    "by rows": "the micro-batches are weighed by their rows: what the loss averages over is labels that count, not rows",
    "padding counts": "the sum is divided by all positions: a label of -100 is no token of the loss, so do not count it",
    "sum": "the losses are summed and never divided by the number of labels",
}


def _gradients(model: nn.Module, micro_batches: list[Batch], way: str) -> dict[str, Any]:
    model.zero_grad()
    loss = sum(WEIGHTS[way](b, micro_batches) * _sum_loss(model, *b) for b in micro_batches)
    loss.backward()
    return {"loss": loss.item(), "gradients": {n: p.grad for n, p in model.named_parameters()}}


def _right_step(told: dict[str, Any], case: tuple[tuple[int, int, int], ...]) -> None:
    counts = [counted for _, _, counted in case]
    if not told["kept"]:
        raise NotYet("the optimizer never stepped: call optimizer.step() once, after the last micro-batch")
    if len(told["kept"]) > 1:
        raise NotYet(f"the optimizer stepped {len(told['kept'])} times: it steps once, after the last micro-batch")
    got, right = told["kept"][0], told["ways"]["right"]
    loss = told["loss"]
    if any(bool(gradient.isnan().any()) for gradient in got.values()) or (isinstance(loss, float) and loss != loss):
        raise NotYet(
            f"with {counts} labels that count the step gives nan: the mean over no labels is 0 / 0. Sum the loss "
            '(reduction="sum") and divide by the labels of the whole step'
        )
    for name, sentence in SENTENCES.items():
        wrong = told["ways"][name]["gradients"]
        if _same(got, wrong) and not _same(wrong, right["gradients"]):
            raise NotYet(f"micro-batches of {counts} labels that count: {sentence}")
    close(
        got, right["gradients"], rtol=RTOL, atol=ATOL, what=f"micro-batches of {counts} labels that count, the gradient"
    )
    if told["left"]:
        raise NotYet(
            "the first step is right and the second is not: gradients are left over from the first. Call zero_grad() once a step, before the first micro-batch or after the optimizer's step"
        )
    loss = returned(loss, (int, float), "the loss that your step returns")
    if abs(loss - told["ways"]["mean of means"]["loss"]) < 1e-5 * loss and len(set(counts)) > 1:
        raise NotYet(
            "the gradient is right and the loss that you return is a mean of means: weigh it like the gradient"
        )
    close(loss, right["loss"], rtol=1e-4, what="the loss that your step returns")


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.allclose(one[n], other[n], rtol=1e-3, atol=1e-6) for n in other)


def _one_graph_at_a_time(told: dict[str, Any], count: int) -> None:
    if told["highest"] > 1.25 * told["largest"]:
        raise NotYet(
            f"right, and nothing is saved: at its highest {told['highest']:,} bytes are kept for backward, where one "
            f"micro-batch needs {told['largest']:,}. Call backward() for each micro-batch, before the next one's forward"
        )
    if told["calls"] != count:
        raise NotYet(f"the model ran {told['calls']} times for {count} micro-batches: once each is enough")
