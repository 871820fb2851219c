"""Everything through one rank: the algorithm that everybody writes first, and the yardstick for the others.

1. Each rank sends what it has to the root, which receives from one rank after the other.
2. The root adds, or sorts, and sends the results out, again to one rank after the other.
3. broadcast, reduce, gather, scatter: n-1 messages, one after the other, through the root's one link: (n-1) · S bytes.
4. all_reduce is reduce, then broadcast: the root sends and receives (n-1) · S bytes, every other rank S.
5. The root's time grows with n while the others wait: a ring moves the same sum with 2(n-1)/n · S per rank.

S: bytes of one rank's tensor. Where the call has no root, the group's first rank is it. ValueError: see
``validation``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.peers import Peers
from course_lib.collectives.by_hand.validation import check_list, check_pieces, check_same

Group = dist.ProcessGroup | None


@torch.no_grad()
def broadcast(tensor: torch.Tensor, root: int = 0, group: Group = None, *, check: bool = True) -> None:
    """Replace ``tensor`` on every rank by that of ``root`` (a global rank)."""
    peers = Peers(group)
    root_member = peers.member(root)
    check_same(peers, "naive.broadcast", tensor, root, check=check)
    _send_out([tensor] * peers.size, tensor, peers, root_member)


@torch.no_grad()
def reduce(tensor: torch.Tensor, root: int = 0, group: Group = None, *, check: bool = True) -> None:
    """Replace ``tensor`` on ``root`` (a global rank) by the sum over the ranks; elsewhere it stays as it is."""
    peers = Peers(group)
    root_member = peers.member(root)
    check_same(peers, "naive.reduce", tensor, root, check=check)
    _add_up(tensor, peers, root_member)


@torch.no_grad()
def all_reduce(tensor: torch.Tensor, group: Group = None, *, check: bool = True) -> None:
    """Replace ``tensor`` by its sum over the ranks, on each of them."""
    peers = Peers(group)
    check_same(peers, "naive.all_reduce", tensor, check=check)
    _add_up(tensor, peers, 0)
    _send_out([tensor] * peers.size, tensor, peers, 0)


@torch.no_grad()
def gather(
    tensor: torch.Tensor,
    outputs: list[torch.Tensor] | None = None,
    root: int = 0,
    group: Group = None,
    *,
    check: bool = True,
) -> None:
    """Fill ``outputs[i]`` on ``root`` (a global rank) with rank i's ``tensor``; sizes may differ. Elsewhere no list."""
    peers = Peers(group)
    root_member = peers.member(root)
    outputs = check_list(peers, "naive.gather", outputs) if peers.rank == root_member else [None] * peers.size
    gives = [tensor if member == root_member else None for member in range(peers.size)]
    check_pieces(peers, "naive.gather", gives, outputs, root, check=check)
    _collect(tensor, outputs, peers, root_member)


@torch.no_grad()
def scatter(
    output: torch.Tensor,
    inputs: list[torch.Tensor] | None = None,
    root: int = 0,
    group: Group = None,
    *,
    check: bool = True,
) -> None:
    """Fill ``output`` on rank r with the root's ``inputs[r]``; sizes may differ. Only the root's ``inputs`` counts."""
    peers = Peers(group)
    root_member = peers.member(root)
    inputs = check_list(peers, "naive.scatter", inputs) if peers.rank == root_member else [None] * peers.size
    takes = [output if member == root_member else None for member in range(peers.size)]
    check_pieces(peers, "naive.scatter", inputs, takes, root, check=check)
    _send_out(inputs, output, peers, root_member)


def _add_up(tensor: torch.Tensor, peers: Peers, root: int) -> None:
    if peers.rank != root:
        return peers.send(tensor, root)
    other = torch.empty_like(tensor)
    for source in range(peers.size):
        if source != root:
            peers.receive(other, source)
            tensor += other


def _collect(tensor: torch.Tensor, outputs: list[torch.Tensor], peers: Peers, root: int) -> None:
    if peers.rank != root:
        return peers.send(tensor, root)
    outputs[root].copy_(tensor.view_as(outputs[root]))
    for source in range(peers.size):
        if source != root:
            peers.receive(outputs[source], source)


def _send_out(pieces: list[torch.Tensor], own: torch.Tensor, peers: Peers, root: int) -> None:
    if peers.rank != root:
        return peers.receive(own, root)
    own.copy_(pieces[root].view_as(own))
    for to in range(peers.size):
        if to != root:
            peers.send(pieces[to], to)
