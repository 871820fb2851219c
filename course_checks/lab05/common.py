"""What the checks of lab 5 share: the lab itself, a model with the cases that sharding code gets wrong, and flat vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_checks.harness import Lab, NotYet, phases, run_ranks
from course_lib.launch import RankFailed, Run

lab = Lab("05_deepspeed_zero", title="ZeRO")
SLACK = 512  # bytes beside what is asked for: step counters, scalars
VOCAB, WIDTH, LENGTH = 29, 31, 6


class Tied(nn.Module):
    """Tokens (rows, length) to logits: a frozen layer first, two layers with one weight, a single number, and eight layers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))
        self.temperature = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embedding(tokens))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.out(hidden) * self.temperature


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token; tokens (rows, length)."""
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy of all elements in one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def sent_per_step(run: Run, ranks: int, steps: int) -> float:
    """Bytes that a rank sends in a step after its first barrier, the mean over the ranks."""
    share, total = (ranks - 1) / ranks, 0.0
    for call in (c for rank in range(ranks) for phase in phases(run, rank)[1:] for c in phase):
        total += share * call.bytes if call.kind in ("broadcast", "gather", "scatter") else call.wire_bytes
    return total / ranks / steps


def under_deepspeed(program: Callable[..., Any], *args: Any, ranks: int) -> Run:
    """Run a program that hands what the learner gave to DeepSpeed; what DeepSpeed refuses is a NotYet."""
    try:
        return run_ranks(program, *args, ranks=ranks, timeout=90.0)
    except RankFailed as failed:
        if failed.where or failed.cause_type == "NotYet":
            raise
        raise NotYet(
            f"DeepSpeed raised {failed.cause_type}: {' '.join(failed.cause_message.split())[:300]}"
        ) from failed
