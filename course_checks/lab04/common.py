"""What the checks of lab 4 share: the lab itself, a small model, and its gradients in one vector."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from course_checks.harness import Lab

lab = Lab("04_ddp_accelerate", title="DDP with Accelerate")
VOCAB, WIDTH, IGNORED = 47, 31, -100  # gradients that do not divide by 3 or 4 ranks
SLACK = 1024  # bytes a step beside the gradients: counts, losses, DDP's new buckets
Batch = tuple[torch.Tensor, torch.Tensor]


def flat(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The gradients of those that train in one float64 vector, a missing one as zeros."""
    every = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters if p.requires_grad]
    return torch.cat([gradient.detach().double().flatten() for gradient in every])


class Tagger(nn.Module):
    """Tokens (rows, length) to logits (rows, length, VOCAB); one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.hidden = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.out = nn.Linear(WIDTH, VOCAB)
        self.hidden[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(self.embedding(tokens)))


def micro_batch(rows: int, length: int, counted: int, generator: torch.Generator) -> Batch:
    """Tokens and labels (rows, length), of which `counted` count."""
    tokens, labels = (torch.randint(VOCAB, (rows, length), generator=generator) for _ in range(2))
    labels.view(-1)[torch.randperm(rows * length, generator=generator)[counted:]] = IGNORED
    return tokens, labels
