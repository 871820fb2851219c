"""All-reduce the gradients of a model in a single message."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@torch.no_grad()
def all_reduce_gradients(
    parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None = None, *, mean: bool = False
) -> None:
    """Replace every gradient by its sum over the group's ranks, or by the mean, all in one all-reduce.

    Of a DTensor's gradient this rank's part is reduced. Parameters without a gradient are left out; on every rank of the
    group they are the same ones.

    Args:
        group: all ranks by default.
        mean: divide by the group's ranks, as DDP does.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    if mean:
        flat /= dist.get_world_size(group)
    for gradient, reduced in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(reduced.view_as(gradient))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
