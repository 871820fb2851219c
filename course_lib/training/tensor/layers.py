"""Linear layers and an embedding split over ranks, each built from the whole layer's weights.

Y = X A with A cut by columns needs all of X and gives each rank some of Y's columns; Z = Y B with B cut by rows takes
just those and gives each rank a summand of Z. One after the other they send nothing in between (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). PyTorch keeps a linear layer's matrix transposed, (out, in): columns are its first
dimension.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.training.tensor.communication import (
    copy_to_ranks,
    gather_sequence,
    scatter_sequence,
    sum_over_ranks,
)


class ColumnParallelLinear(nn.Module):
    """(batch, s, in) on every rank -> (batch, s, out / n): this rank's outputs.

    Args:
        whole: the layer that is cut; only copies of its weights are kept.
        group: the n ranks.
        sequence_parallel: the input is (batch, s / n, in), this rank's part of the sequence.
        enter: False leaves f out, where the caller has called it once for several layers with the same input.
    """

    def __init__(
        self, whole: nn.Linear, group: dist.ProcessGroup, *, sequence_parallel: bool = False, enter: bool = True
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.enter = group, sequence_parallel, enter
        self.weight = own_part(whole.weight, 0, group, "outputs")
        self.bias = None if whole.bias is None else own_part(whole.bias, 0, group, "outputs")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.enter:
            x = gather_sequence(x, self.group) if self.sequence_parallel else copy_to_ranks(x, self.group)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """(batch, s, in / n), this rank's inputs -> (batch, s, out) on every rank.

    Args:
        whole, group: as above.
        sequence_parallel: the output is (batch, s / n, out), this rank's part of the sequence.
    """

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = own_part(whole.weight, 1, group, "inputs")
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())
        if self.bias is not None:
            self.bias.partial_gradient = sequence_parallel  # it is added to a part of the sequence only

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.weight)
        x = scatter_sequence(x, self.group) if self.sequence_parallel else sum_over_ranks(x, self.group)
        return x if self.bias is None else x + self.bias  # after the sum: n ranks would add it n times


class VocabParallelEmbedding(nn.Module):
    """Ids (batch, s) -> (batch, s, hidden) on every rank; each rank looks up its own rows of the table.

    Args:
        whole, group: as above.
        sequence_parallel: the output is (batch, s / n, hidden).
    """

    def __init__(self, whole: nn.Embedding, group: dist.ProcessGroup, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = own_part(whole.weight, 0, group, "tokens of the vocabulary")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.weight.shape[0]
        local = ids - self.group.rank() * rows
        elsewhere = (local < 0) | (local >= rows)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        x = x.masked_fill(elsewhere[..., None], 0.0)  # exactly one rank has something else than 0 to add
        return scatter_sequence(x, self.group) if self.sequence_parallel else sum_over_ranks(x, self.group)


def own_part(whole: torch.Tensor, dim: int, group: dist.ProcessGroup, what: str) -> nn.Parameter:
    """This rank's equal share of a weight along `dim`, as a parameter of its own. Raises ValueError as above."""
    if whole.shape[dim] % group.size():
        raise ValueError(
            f"{whole.shape[dim]} {what} do not divide over {group.size()} ranks: take a number of ranks that divides them."
        )
    return nn.Parameter(
        whole.detach().chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)
    )
