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
    _check_tensors(call, [tensor])
    if check:
        _compare(peers, call, {"call": call, "root": root, "dtype": tensor.dtype, "shape": tuple(tensor.shape)})


def check_pieces(
    peers: Peers,
    call: str,
    gives: list[torch.Tensor | None],
    takes: list[torch.Tensor | None],
    root: int | None = None,
    *,
    check: bool,
) -> None:
    """Check for each pair of ranks that one gives as many elements as the other expects, all of one dtype.

    Args:
        gives: by member, what this rank gives to it; ``None`` for nothing.
        takes: by member, where what it gives to this rank goes.

    Raises:
        ValueError: they do not fit; one sentence that names the ranks, on every rank of the group.
    """
    pieces = [piece for piece in (*gives, *takes) if piece is not None]
    _check_tensors(call, pieces)
    if not check:
        return
    given, taken = ([0 if piece is None else piece.numel() for piece in row] for row in (gives, takes))
    everybody = _compare(peers, call, {"call": call, "root": root, "dtype": pieces[0].dtype}, given, taken)
    for giver, (_, given, _) in enumerate(everybody):
        for taker, (_, _, taken) in enumerate(everybody):
            if given[taker] != taken[giver]:
                raise ValueError(
                    f"{call}: rank {peers.ranks[giver]} gives rank {peers.ranks[taker]} {given[taker]} elements, which "
                    f"expects {taken[giver]}: make the pieces of both ranks the same size."
                )


def check_list(peers: Peers, call: str, pieces: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """Return the list when it holds one tensor per rank of the group.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(pieces, (list, tuple)) or len(pieces) != peers.size:
        actual = f"a list of {len(pieces)}" if isinstance(pieces, (list, tuple)) else type(pieces).__name__
        raise ValueError(f"{call}: got {actual} where a list of {peers.size} tensors, one per rank, is needed.")
    return list(pieces)


def _check_tensors(call: str, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{call}: got a {type(tensor).__name__} where a tensor is needed.")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{call}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
                "pass tensor.contiguous(), and copy the result back where you need it."
            )
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{call}: one call, one dtype, not {tensors[0].dtype} and {tensor.dtype}.")


def _compare(peers: Peers, call: str, facts: dict[str, Any], *counts: list[int]) -> list[Any]:
    """Return (facts, *counts) of every member, the facts being equal."""
    everybody: list[Any] = [None] * peers.size
    dist.all_gather_object(everybody, (facts, *counts), group=peers.group)
    for what in facts:
        ranks_by_value = defaultdict(list)
        for rank, (theirs, *_) in zip(peers.ranks, everybody, strict=True):
            ranks_by_value[theirs.get(what)].append(str(rank))
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on {', '.join(ranks)}" for value, ranks in ranks_by_value.items())
            raise ValueError(
                f"{call}: the ranks differ in their {what} ({values}): give the same {what} on every rank."
            )
    return everybody
