"""The binomial tree: in every step twice as many ranks take part, so it is over after ceil(log2 n) steps.

1. Broadcast: in step k = 1, 2, 4, … each rank that has the tensor sends it to the rank k further on, counted from the
   root. After the step 2k ranks have it.
2. Reduce is the same backwards: the ranks furthest out send first, and each sum moves one branch closer to the root.
3. All-reduce: reduce to the group's first rank, then broadcast from there: 2 ceil(log2 n) steps.
4. Messages are whole tensors. All ranks together send n-1 of them, as in ``naive``, but side by side: the root sends
   ceil(log2 n) · S bytes in a broadcast and nothing in a reduce, a leaf the other way round.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.peers import Peers
from course_lib.collectives.by_hand.validation import check_same

Group = dist.ProcessGroup | None


@torch.no_grad()
def broadcast(tensor: torch.Tensor, root: int = 0, group: Group = None, *, check: bool = True) -> None:
    """Replace ``tensor`` [any shape] on every rank by that of ``root`` (a global rank).

    Raises:
        ValueError: a root outside the group, ranks that do not agree, a tensor that is not contiguous, a group
            without this rank.
    """
    peers = Peers(group)
    root_member = peers.member(root)
    check_same(peers, "tree.broadcast", tensor, root, check=check)
    _spread(tensor, peers, root_member)


@torch.no_grad()
def reduce(tensor: torch.Tensor, root: int = 0, group: Group = None, *, check: bool = True) -> None:
    """Replace ``tensor`` on ``root`` (a global rank) by the sum over the ranks; elsewhere it stays as it is.

    Raises:
        ValueError: as :func:`broadcast`.
    """
    peers = Peers(group)
    root_member = peers.member(root)
    check_same(peers, "tree.reduce", tensor, root, check=check)
    _add_up(tensor if peers.rank == root_member else tensor.clone(), peers, root_member)


@torch.no_grad()
def all_reduce(tensor: torch.Tensor, group: Group = None, *, check: bool = True) -> None:
    """Replace ``tensor`` by its sum over the ranks, on each of them.

    Raises:
        ValueError: as :func:`broadcast`, but for the root.
    """
    peers = Peers(group)
    check_same(peers, "tree.all_reduce", tensor, check=check)
    _add_up(tensor, peers, 0)
    _spread(tensor, peers, 0)


def _spread(tensor: torch.Tensor, peers: Peers, root: int) -> None:
    n, place = peers.size, (peers.rank - root) % peers.size  # place 0 is the root
    step = 1
    while step < n:
        if place < step and place + step < n:
            peers.send(tensor, (peers.rank + step) % n)
        elif step <= place < 2 * step:
            peers.receive(tensor, (peers.rank - step) % n)
        step *= 2


def _add_up(tensor: torch.Tensor, peers: Peers, root: int) -> None:
    """``tensor`` holds the sum on the root, a partial sum elsewhere."""
    n, place = peers.size, (peers.rank - root) % peers.size
    step = 1 << (n - 1).bit_length() >> 1  # the last step of the broadcast comes first
    branch = torch.empty_like(tensor) if place < step else tensor
    while step:
        if place < step and place + step < n:
            peers.receive(branch, (peers.rank + step) % n)
            tensor += branch
        elif step <= place < 2 * step:
            peers.send(tensor, (peers.rank - step) % n)
        step //= 2
