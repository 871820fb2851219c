"""The collectives of tensor parallelism, each with its counterpart in the backward pass.

`copy_to_ranks` and `sum_over_ranks` are Megatron-LM's f and g (Shoeybi et al. 2019, arXiv:1909.08053, section 3);
`gather_sequence` and `scatter_sequence` take their places under sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2). Hidden states are (batch, sequence, hidden).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

SEQUENCE = 1  # the dimension of (batch, sequence, hidden) that sequence parallelism cuts


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(gradient, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(gradient, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(gradient, ctx.group), None


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own_part(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(gradient, ctx.group), None


class _JoinParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own_part(gradient, ctx.group), None


def copy_to_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """f: forward nothing is sent, for every rank has x already; backward the ranks' gradients of x are summed.

    Each rank's matrix reads all of x, so each rank's gradient of x knows only of its own matrix.
    """
    return _CopyToRanks.apply(x, group)


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """g: forward the ranks' results are summed; backward every rank takes the gradient of the sum, which all have."""
    return _SumOverRanks.apply(x, group)


def gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """f of sequence parallelism: forward the parts of the sequence are gathered, (batch, s / n, hidden) -> (batch, s,
    hidden); backward the ranks' gradients are summed and each rank gets its part: a reduce-scatter."""
    return _GatherSequence.apply(x, group)


def scatter_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """g of sequence parallelism: forward the ranks' results are summed, each rank getting its part of the sequence (a
    reduce-scatter); backward the parts' gradients are gathered."""
    return _ScatterSequence.apply(x, group)


def take_part(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Forward this rank's part of a sequence that all ranks have; backward the parts' gradients are gathered."""
    return _TakePart.apply(x, group)


def join_parts(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Forward the parts are gathered, for what all ranks then compute alike; backward each takes its part's gradient."""
    return _JoinParts.apply(x, group)


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)  # all_reduce writes in place, and x is not ours
    dist.all_reduce(summed, group=group)
    return summed


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
    return torch.cat(parts.chunk(ranks), dim=SEQUENCE)  # it comes rank after rank


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = torch.cat(x.chunk(group.size(), dim=SEQUENCE))
    mine = x.new_empty(x.shape[0], x.shape[1] // group.size(), *x.shape[2:])
    dist.reduce_scatter_tensor(mine, parts, group=group)
    return mine


def _own_part(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(group.size(), dim=SEQUENCE)[group.rank()].contiguous()
