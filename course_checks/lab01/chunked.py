"""Lab 1, exercise 2: a soft-capped cross-entropy that never holds the logits of all tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from course_checks.harness import Contract, LiveTensors, fresh, fresh_seed, named_seed, returned
from course_checks.lab01.common import lab

CHUNKS_AT_ONCE = 7  # (chunk x vocabulary) tensors in fp32: with a soft cap written out by hand, six are alive together
HINTS = {
    "chunks with fewer targets must weigh less, and one without any must weigh nothing": lambda f: (
        f.near(f["of means"]) or (f["clause"] == "the loss" and math.isnan(f["the loss"].item()))
    ),
    "tokens without a target count as well: divide by the number of targets": lambda f: f.near(f["over tokens"]),
    "backward() leaves the gradient of the loss itself: multiply it by the gradient that comes in": lambda f: (
        f["clause"] == "gradient of hidden"
        and torch.allclose(f["gradient of hidden"] * f["weight"], f["wanted"].float(), rtol=1e-2, atol=1e-5)
    ),
    "after forward that much is still there: the graph keeps every chunk's tensors for backward": lambda f: (
        f["clause"] == "the worst moment" and f["after forward"] > f["budget"]
    ),
}


class Case(NamedTuple):
    """A loss over `tokens`, of which the share `ignored` has no target; it is multiplied by `weight` before backward."""

    tokens: int
    width: int
    vocab: int
    chunk: int
    softcap: float | None
    ignored: float
    weight: float = 1.0
    scale: float = 1.0

    def __str__(self) -> str:
        capped = f", softcap {self.softcap}" if self.softcap else ""
        return f"{self.tokens} tokens, vocabulary {self.vocab}, chunks of {self.chunk}{capped}"


CASES = (
    Case(48, 8, 50, 16, None, 0.0, scale=25.0),  # logits beyond 88, where exp() ends in fp32
    Case(70, 12, 64, 16, None, 0.4, weight=0.25),  # the last chunk has 6 tokens
    Case(45, 8, 40, 64, 5.5, 0.3),  # one chunk, larger than all tokens
    Case(64, 8, 48, 24, 3.0, 0.8, weight=-3.0),  # the first chunk has no target at all
)
# And up to 3 tokens more to a chunk. No chunk has as many tokens as the head is wide: their logits are told from its gradient.
LARGE = (Case(720, 41, 3000, 34, None, 0.2), Case(500, 29, 2500, 5, 4.0, 0.2))


class Facts(dict):
    def near(self, value: float) -> bool:
        return self["clause"] == "the loss" and math.isclose(self["the loss"].item(), value, rel_tol=1e-4)


def inputs(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fresh hidden (tokens, width) and head (vocab, width), which ask for gradients, and labels (tokens,)."""
    hidden = (case.scale * fresh((case.tokens, case.width), seed)).requires_grad_()
    head = fresh((case.vocab, case.width), seed, rank=1).requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(case.vocab, (case.tokens,), generator=generator)
    labels[torch.rand(case.tokens, generator=generator) < case.ignored / 2] = -100
    labels[: int(case.ignored * case.tokens / 2)] = -100
    labels[-1] = 0  # one target at least
    return hidden, head, labels


@lab.exercise("A loss on a byte budget", importance=5, difficulty=4, minutes=30)
def chunked_loss(chunked_loss: Callable[..., Any]) -> str:
    """Loss and gradients at four shapes; then the bytes at the worst moment of two large ones."""
    seed = fresh_seed()
    with named_seed(seed):
        for case in CASES:
            _values(chunked_loss, case, seed)
        return "; ".join(_bytes(chunked_loss, case._replace(chunk=case.chunk + seed % 4), seed) for case in LARGE)


def _call(chunked_loss: Callable[..., Any], case: Case, given: Any, contract: Contract) -> torch.Tensor:
    softcap = {} if case.softcap is None else {"softcap": case.softcap}
    loss = returned(chunked_loss(*given, case.chunk, **softcap), torch.Tensor, "the loss")
    contract.holds(loss.dim() == 0, f"the loss has the shape {tuple(loss.shape)}, and should be one number")
    contract.holds(loss.dtype == given[0].dtype, f"the loss is in {loss.dtype}, and hidden in {given[0].dtype}")
    contract.holds(loss.requires_grad, "the loss has no graph: backward() must reach `hidden` and `head`")
    return loss


def _values(chunked_loss: Callable[..., Any], case: Case, seed: int) -> None:
    given, (hidden, head, labels) = inputs(case, seed), inputs(case, seed)
    logits = hidden.double() @ head.double().T
    logits = case.softcap * torch.tanh(logits / case.softcap) if case.softcap else logits
    each, counts = cross_entropy(logits, labels, reduction="none"), labels != -100
    expected = each.sum() / counts.sum()
    (expected * case.weight).backward()
    pieces = zip(each.detach().split(case.chunk), counts.split(case.chunk), strict=True)
    means = [(some.sum() / here.sum()).item() for some, here in pieces if here.any()]
    facts = {"of means": sum(means) / len(means), "over tokens": each.mean().item(), "weight": case.weight}
    contract = Contract(HINTS, Facts(facts, wanted=hidden.grad), about=str(case))
    made_from = (given[0] * 1, given[1] * 1, given[2])  # in a model, neither is a leaf
    loss = _call(chunked_loss, case, made_from, contract)
    _call(chunked_loss, case, inputs(case, seed + 1), contract)  # another loss before the first one's backward
    contract.values("the loss", loss, expected, rtol=2e-5)
    (loss * case.weight).backward()
    for name, mine, wanted in (("hidden", given[0].grad, hidden.grad), ("head", given[1].grad, head.grad)):
        contract.holds(mine is not None, f"`{name}` has no gradient after backward()")
        atol = 1e-4 * wanted.abs().max().item()
        contract.values(f"gradient of {name}", mine, wanted, rtol=0, atol=atol)


def _bytes(chunked_loss: Callable[..., Any], case: Case, seed: int) -> str:
    given, one = inputs(case, seed), 4 * case.chunk * case.vocab
    budget = CHUNKS_AT_ONCE * one + 3 * (
        given[0].nbytes + given[1].nbytes
    )  # gradient, what is added to it, one to spare
    contract = Contract(HINTS, Facts(budget=budget), about=str(case))
    with LiveTensors(every=True) as live:
        loss = _call(chunked_loss, case, given, contract)
        contract.facts["after forward"] = live.bytes()
        loss.backward()
    made = [math.prod(new.shape) for new in live.made if case.vocab in new.shape and case.width not in new.shape]
    targets = int((given[2] != -100).sum())
    contract.holds(sum(made) >= targets * case.vocab, "not all logits were computed")
    contract.holds(max(made) <= case.chunk * case.vocab, f"you make the logits of {max(made) // case.vocab} tokens")
    contract.memory("the worst moment", live.highest, at_most=budget, at_least=one)
    return contract.evidence()
