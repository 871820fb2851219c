"""Sum gradients in an order that does not depend on the number of ranks.

Adding in another order rounds differently, and the order of an all-reduce depends on the number of ranks. Here the global
batch is split into as many shards as there are *virtual ranks*, a number that a run never changes. Whichever rank computed
a shard's gradient, the sum runs over shards 0, 1, 2, … (Li et al. 2022, "EasyScale", arXiv:2208.14228).
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.distributed as dist

from course_lib.models.data import rank_slice


def shards_of(rank: int, world_size: int, virtual_ranks: int) -> range:
    """The virtual ranks whose shards ``rank`` computes: neighbours, in order. Raises ValueError where it would get none."""
    mine = rank_slice(virtual_ranks, rank, world_size)
    return range(mine.start, mine.stop)


def stream_seed(seed: int, virtual_rank: int, drawn: int) -> int:
    """The seed of a virtual rank's random numbers (dropout) when it draws for the ``drawn``-th time.

    The state of its stream is thus one number, which a checkpoint keeps and any rank can go on from.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{virtual_rank}/{drawn}".encode()).digest()[:7], "big")


def add_in_order(rows: torch.Tensor) -> torch.Tensor:
    """(rows, n) to (n,): row 0, plus row 1, plus row 2. ``rows.sum(0)`` may choose another order for other shapes."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def sum_exactly(mine: torch.Tensor, virtual_ranks: int) -> torch.Tensor:
    """The sum over all virtual ranks' rows, equal bit for bit on any number of ranks.

    A ring all-reduce's two halves with the addition taken out: each rank gets its part of *every* row (all-to-all), adds
    them in the order of the virtual ranks, and gives the sum to all (all-gather). See ``sent_bytes`` for the price.

    Args:
        mine: (shards of this rank, n), in the order of ``shards_of``.
        virtual_ranks: rows on all ranks together.

    Returns:
        (n,) on every rank.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return add_in_order(mine)
    rows, n = mine.shape
    part = math.ceil(n / world_size)
    padded = torch.nn.functional.pad(mine, (0, part * world_size - n))
    outgoing = padded.view(rows, world_size, part).transpose(0, 1).flatten()  # what rank 0 gets, what rank 1 gets, …
    incoming = mine.new_empty(virtual_ranks * part)
    from_each = [len(shards_of(rank, world_size, virtual_ranks)) * part for rank in range(world_size)]
    dist.all_to_all_single(incoming, outgoing, from_each, [rows * part] * world_size)
    whole = mine.new_empty(world_size, part)
    dist.all_gather(list(whole), add_in_order(incoming.view(virtual_ranks, part)))
    return whole.flatten()[:n]


def sum_as_it_comes(mine: torch.Tensor) -> torch.Tensor:
    """The same sum by one all-reduce: cheaper, and equal to about 1e-6 when the number of ranks changes."""
    total = add_in_order(mine)
    dist.all_reduce(total)
    return total


def sent_bytes(n: int, world_size: int, virtual_ranks: int, *, exact: bool, element: int = 4) -> float:
    """Bytes that a rank sends for one sum of n numbers, on average over the ranks.

    Exact: (V/W + 1) (W - 1)/W n elements; a ring all-reduce: 2 (W - 1)/W n. So with as many virtual ranks as ranks the
    exact sum costs nothing more, with twice as many 1.5 times as much.
    """
    halves = virtual_ranks / world_size + 1 if exact else 2
    return halves * (world_size - 1) / world_size * n * element
