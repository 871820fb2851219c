"""Recursive halving, then doubling: as few bytes as the ring in 2 log2 n steps (Rabenseifner's all-reduce).

1. Halving, steps k = n/2, n/4, … 1: rank r and r XOR k share the range that both hold; each sends the half that the
   other keeps, and adds what it gets to its own half. Then rank r holds chunk r of the sum: a reduce-scatter.
2. Doubling, the same steps backwards: partners exchange their finished ranges until everybody has all of it: an
   all-gather.
3. Bytes a rank: S/2 + S/4 + … = (n-1)/n · S for each half of the way, 2(n-1)/n · S in all, as the ring.
4. But partners are far apart, and messages are up to S/2: on a cluster these long paths share links that a ring leaves
   free.
5. p < n < 2p ranks: the last n-p are folded in, as in ``doubling``: they send S bytes, their helpers S more.

Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.agreement import same_everywhere
from course_lib.collectives.by_hand.doubling import fold_in, hand_back, largest_power_of_two
from course_lib.collectives.by_hand.peers import Peers


@torch.no_grad()
def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, check: bool = True) -> None:
    """Replace ``tensor`` [any shape] by its sum over the group's ranks, on each of them.

    Raises:
        ValueError: ranks that do not agree, a tensor that is not contiguous, a group without this rank.
    """
    peers = Peers(group)
    same_everywhere(peers, "halving.all_reduce", tensor, check=check)
    core = largest_power_of_two(peers.size)
    flat = tensor.view(-1)
    # what arrives is at most half the tensor, or all of it from a rank that is folded in
    buffer = torch.empty_like(flat) if peers.rank + core < peers.size else flat.new_empty((flat.numel() + 1) // 2)
    if fold_in(flat, buffer, peers, core):
        path = []
        start, end, step = 0, flat.numel(), core // 2
        while step:
            middle = start + (end - start + 1) // 2
            lower, upper = (start, middle), (middle, end)
            keep, give = (upper, lower) if peers.rank & step else (lower, upper)
            theirs = buffer[: keep[1] - keep[0]]
            peers.exchange(flat[slice(*give)], peers.rank ^ step, theirs, peers.rank ^ step)
            flat[slice(*keep)] += theirs
            path.append((step, keep, give))
            start, end = keep
            step //= 2
        for step, keep, give in reversed(path):
            peers.exchange(flat[slice(*keep)], peers.rank ^ step, flat[slice(*give)], peers.rank ^ step)
    hand_back(flat, peers, core)
