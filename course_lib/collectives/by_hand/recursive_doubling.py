"""Recursive doubling: after every step each rank knows the sum of twice as many ranks.

1. In step k = 1, 2, 4, … rank r and its partner r XOR k exchange what they have, whole tensors, and both add.
2. After log2 n steps everybody has the sum: the fewest steps there are, and log2 n · S bytes per rank. The best choice for
   a small tensor, where a step costs its latency; the ring sends less once the bytes count.
3. A number of ranks that is no power of two, p < n < 2p: each of the last n-p ranks first hands its tensor to one of the
   first, sits the steps out, and gets the sum at the end: two steps more. It sends S bytes, its helper (log2 p + 1) · S.
4. Both partners add the same two numbers, so all ranks end with the same bits.

Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.peers import Peers
from course_lib.collectives.by_hand.validation import check_same


@torch.no_grad()
def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, check: bool = True) -> None:
    """Replace ``tensor`` [any shape] by its sum over the group's ranks, on each of them.

    Raises:
        ValueError: ranks that do not agree, a tensor that is not contiguous, a group without this rank.
    """
    peers = Peers(group)
    check_same(peers, "recursive_doubling.all_reduce", tensor, check=check)
    core = 1 << peers.size.bit_length() - 1  # the largest power of two that is at most n
    theirs = torch.empty_like(tensor)
    if _fold_in(tensor, theirs, peers, core):
        step = 1
        while step < core:
            peers.exchange(tensor, peers.rank ^ step, theirs, peers.rank ^ step)
            tensor += theirs
            step *= 2
    _hand_back(tensor, peers, core)


def _fold_in(tensor: torch.Tensor, buffer: torch.Tensor, peers: Peers, core: int) -> bool:
    """Members from ``core`` on give their tensor to a member below it. True for those that go on."""
    if peers.rank >= core:
        peers.send(tensor, peers.rank - core)
        return False
    if peers.rank + core < peers.size:
        peers.receive(buffer, peers.rank + core)
        tensor += buffer
    return True


def _hand_back(tensor: torch.Tensor, peers: Peers, core: int) -> None:
    """The members that sat out get the finished tensor from whoever they gave theirs to."""
    if peers.rank >= core:
        peers.receive(tensor, peers.rank - core)
    elif peers.rank + core < peers.size:
        peers.send(tensor, peers.rank + core)
