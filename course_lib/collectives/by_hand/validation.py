"""Compare what the ranks of a group bring to a call, so that bad input raises an error instead of hanging.

One small ``all_gather_object`` before the payload; ``check=False``, on all ranks alike, leaves it out.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.peers import Peers


def check_same(peers: Peers, call: str, tensor: torch.Tensor, root: int | None = None, *, check: bool) -> None:
    """Check that every rank brings a contiguous tensor of the same shape and dtype, and the same root (a global rank).

    Raises:
        ValueError: they differ; one sentence that names the ranks, on every rank of the group.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{call}: got a {type(tensor).__name__} where a tensor is needed.")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{call}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
            "pass tensor.contiguous(), and copy the result back where you need it."
        )
    if not check:
        return
    facts = {"call": call, "root": root, "dtype": tensor.dtype, "shape": tuple(tensor.shape)}
    everybody: list[Any] = [None] * peers.size
    dist.all_gather_object(everybody, facts, group=peers.group)
    for what in facts:
        ranks_by_value = defaultdict(list)
        for rank, theirs in zip(peers.ranks, everybody, strict=True):
            ranks_by_value[theirs[what]].append(str(rank))
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on {', '.join(ranks)}" for value, ranks in ranks_by_value.items())
            raise ValueError(
                f"{call}: the ranks differ in their {what} ({values}): give the same {what} on every rank."
            )
