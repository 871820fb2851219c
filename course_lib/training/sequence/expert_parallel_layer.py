"""A mixture-of-experts layer whose experts are spread over ranks: tokens travel to their experts and back.

A router chooses for every token the one or two experts (small MLPs) that see it. With experts on several ranks, one
all-to-all of uneven sizes brings each token to where its expert lives and a second one brings the result home; in the
backward pass both run the other way. GShard (arXiv:2006.16668), Switch Transformer (arXiv:2101.03961). No token is ever
dropped here: an expert takes as many as choose it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one forward pass went.

    Attributes:
        counts: of this rank's tokens, how many chose each expert (a token counts once for every expert it chose).
        sent: rows of the first all-to-all, by the rank they went to, this one included.
        received: rows that came here, by the rank they came from, this one included.
        rank: this rank's number in the group.
        row_bytes: of one token's hidden state.
    """

    counts: list[int]
    sent: list[int]
    received: list[int]
    rank: int
    row_bytes: int

    @property
    def bytes_to_others(self) -> int:
        """What leaves this rank in a forward and a backward pass: there, back, and the gradients of both."""
        there, back = (sum(rows) - rows[self.rank] for rows in (self.sent, self.received))
        return 2 * (there + back) * self.row_bytes


class Expert(nn.Module):
    """Llama's MLP, small: (tokens, hidden) to the same."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts(nn.Module):
    """Takes the place of a transformer block's MLP: (batch, tokens, hidden) to the same.

    Args:
        hidden: width of a token.
        intermediate: width inside an expert.
        experts: in all.
        top_k: experts that see a token; each result is weighted by the router's probability for it.

    Attributes:
        own: numbers of the experts that live on this rank: all of them until `spread`.
        routing: of the last forward pass.
    """

    def __init__(self, hidden: int, intermediate: int, *, experts: int, top_k: int) -> None:
        super().__init__()
        check_choice(experts, top_k)
        self.num_experts, self.top_k = experts, top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, intermediate) for _ in range(experts))
        self.own = range(experts)
        self.group: dist.ProcessGroup | None = None
        self.rank, self.ranks = 0, 1
        self.routing: Routing | None = None

    def spread(self, group: dist.ProcessGroup) -> MixtureOfExperts:
        """Keep this rank's experts alone; the router stays whole on every rank."""
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        check_spread(self.num_experts, self.ranks)
        each = self.num_experts // self.ranks
        self.own = range(self.rank * each, (self.rank + 1) * each)
        self.experts = nn.ModuleList(self.experts[i] for i in self.own)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)  # both (tokens, top_k)
        by_expert = chosen.flatten().argsort(stable=True)  # expert 0's tokens first, then expert 1's, …
        token = by_expert // self.top_k
        counts = chosen.flatten().bincount(minlength=self.num_experts)
        results = self._visit(tokens[token], counts)
        weighted = results * weights.flatten()[by_expert, None]
        return torch.zeros_like(tokens).index_add(0, token, weighted).view_as(x)

    def _visit(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Rows (copies of tokens, hidden), sorted by expert, through their experts, wherever these are; in the same order."""
        there = counts.view(self.ranks, -1)  # row: the rank that has the experts; column: which of its experts
        here = torch.empty_like(there)  # row: the rank that the tokens are from; column: which of our experts
        if self.group is None:
            here.copy_(there)
        else:
            dist.all_to_all_single(here, there.contiguous(), group=self.group)  # how many will come, from whom
        sent, received = there.sum(1).tolist(), here.sum(1).tolist()
        self.routing = Routing(counts.tolist(), sent, received, self.rank, rows.shape[1] * rows.element_size())

        arrived = _AllToAll.apply(rows, sent, received, self.group)
        expert = torch.arange(len(self.own), device=rows.device).repeat(self.ranks)
        by_expert = expert.repeat_interleave(here.flatten()).argsort(stable=True)  # arrived by rank, and now by expert
        parts = arrived[by_expert].split(here.sum(0).tolist())
        results = torch.cat([one(part) for one, part in zip(self.experts, parts, strict=True)])
        return _AllToAll.apply(results[by_expert.argsort()], received, sent, self.group)


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks that they belong to. The gradient of a row goes back to where the row came from."""

    @staticmethod
    def forward(ctx: Any, rows, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad):
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    if group is None:  # one process: everything is here already
        return rows.clone()
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def check_choice(experts: int, top_k: int) -> None:
    """Raise ValueError unless a token can choose `top_k` of the experts."""
    if experts < 1:
        raise ValueError(f"experts={experts}: give a whole number of at least 1.")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k}: a token can choose 1 to {experts} of the {experts} experts.")


def check_spread(experts: int, ranks: int) -> None:
    """Raise ValueError unless every rank gets as many experts as every other."""
    if experts % ranks:
        raise ValueError(f"{experts} experts do not divide over {ranks} ranks: give a multiple of {ranks}.")
