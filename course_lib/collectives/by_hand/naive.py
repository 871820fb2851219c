"""Everything through the root: the algorithm that everybody writes first, and the yardstick for the others.

1. Whoever has something sends it to the root, which takes one rank after the other.
2. The root adds, or sorts, and sends the answers out, again one rank after the other.
3. broadcast, reduce, gather, scatter: n-1 messages, one after the other, through the root's one link: (n-1) · S bytes.
4. all_reduce is reduce, then broadcast: the root sends and receives (n-1) · S bytes, every other rank S.
5. The root's time grows with n while the others wait: a ring moves the same sum with 2(n-1)/n · S a rank.

S: bytes of one rank's tensor. Where the call has no root, the group's first rank is it. ValueError: see ``agreement``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.agreement import one_a_rank, pieces_fit, same_everywhere
from course_lib.collectives.by_hand.peers import Peers

Group = dist.ProcessGroup | None


@torch.no_grad()
def broadcast(tensor: torch.Tensor, root: int = 0, group: Group = None, *, check: bool = True) -> None:
    """``tensor`` becomes that of ``root`` (a global rank) on every rank."""
    peers = Peers(group)
    at = peers.member(root)
    same_everywhere(peers, "naive.broadcast", tensor, root, check=check)
    _send_out([tensor] * peers.size, tensor, peers, at)


@torch.no_grad()
def reduce(tensor: torch.Tensor, root: int = 0, group: Group = None, *, check: bool = True) -> None:
    """On ``root`` (a global rank) ``tensor`` becomes the sum over the ranks; elsewhere it stays as it is."""
    peers = Peers(group)
    at = peers.member(root)
    same_everywhere(peers, "naive.reduce", tensor, root, check=check)
    _add_up(tensor, peers, at)


@torch.no_grad()
def all_reduce(tensor: torch.Tensor, group: Group = None, *, check: bool = True) -> None:
    """``tensor`` becomes the sum over the ranks, on each of them."""
    peers = Peers(group)
    same_everywhere(peers, "naive.all_reduce", tensor, check=check)
    _add_up(tensor, peers, 0)
    _send_out([tensor] * peers.size, tensor, peers, 0)


@torch.no_grad()
def gather(
    tensor: torch.Tensor, outputs: list[torch.Tensor] | None = None, root: int = 0, group: Group = None,
    *, check: bool = True,
) -> None:  # fmt: skip
    """On ``root`` (a global rank) ``outputs[i]`` becomes rank i's ``tensor``; sizes may differ. Elsewhere no list."""
    peers = Peers(group)
    at = peers.member(root)
    outputs = one_a_rank(peers, "naive.gather", outputs) if peers.rank == at else [None] * peers.size
    gives = [tensor if member == at else None for member in range(peers.size)]
    pieces_fit(peers, "naive.gather", gives, outputs, root, check=check)
    _collect(tensor, outputs, peers, at)


@torch.no_grad()
def scatter(
    output: torch.Tensor, inputs: list[torch.Tensor] | None = None, root: int = 0, group: Group = None,
    *, check: bool = True,
) -> None:  # fmt: skip
    """``output`` becomes the root's ``inputs[r]`` on rank r; sizes may differ. ``inputs`` counts on the root only."""
    peers = Peers(group)
    at = peers.member(root)
    inputs = one_a_rank(peers, "naive.scatter", inputs) if peers.rank == at else [None] * peers.size
    takes = [output if member == at else None for member in range(peers.size)]
    pieces_fit(peers, "naive.scatter", inputs, takes, root, check=check)
    _send_out(inputs, output, peers, at)


@torch.no_grad()
def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, *, check: bool = True) -> None:
    """``outputs[i]`` becomes rank i's ``tensor`` on every rank; sizes may differ. The root sends n(n-1) shards."""
    peers = Peers(group)
    outputs = one_a_rank(peers, "naive.all_gather", outputs)
    pieces_fit(peers, "naive.all_gather", [tensor] * peers.size, outputs, check=check)
    _collect(tensor, outputs, peers, 0)
    outputs[peers.rank].copy_(tensor.view_as(outputs[peers.rank]))
    for output in outputs:
        _send_out([output] * peers.size, output, peers, 0)


@torch.no_grad()
def reduce_scatter(
    output: torch.Tensor, inputs: list[torch.Tensor], group: Group = None, *, check: bool = True
) -> None:
    """``output`` becomes the sum over the ranks of their ``inputs[r]`` on rank r; sizes may differ."""
    peers = Peers(group)
    inputs = one_a_rank(peers, "naive.reduce_scatter", inputs)
    pieces_fit(peers, "naive.reduce_scatter", inputs, [output] * peers.size, check=check)
    sums = [piece.clone() if peers.rank == 0 else piece for piece in inputs]
    for piece in sums:
        _add_up(piece, peers, 0)
    _send_out(sums, output, peers, 0)


@torch.no_grad()
def all_to_all(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Group = None, *, check: bool = True
) -> None:
    """``outputs[i]`` becomes rank i's ``inputs[r]`` on rank r: n gathers, each passed on. Pieces of one size only."""
    peers = Peers(group)
    inputs, outputs = (one_a_rank(peers, "naive.all_to_all", pieces) for pieces in (inputs, outputs))
    if len({piece.numel() for piece in (*inputs, *outputs)}) > 1:
        raise ValueError("naive.all_to_all: the pieces differ in size: use all_to_all.all_to_all for such.")
    pieces_fit(peers, "naive.all_to_all", inputs, outputs, check=check)
    for receiver, piece in enumerate(inputs):
        held = outputs if receiver == 0 else [torch.empty_like(piece) for _ in inputs]
        _collect(piece, held, peers, 0)
        for source in range(peers.size) if receiver else ():
            if peers.rank == 0:
                peers.send(held[source], receiver)
            elif peers.rank == receiver:
                peers.receive(outputs[source], 0)


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
