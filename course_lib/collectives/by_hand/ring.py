"""The ring: every rank talks to its two neighbours only, and never sends the whole tensor.

1. The tensor of S bytes is cut into n chunks. Every step a rank sends one chunk to the right and gets one from the left.
2. Reduce-scatter, n-1 steps: what arrives is added to the own chunk, and passed on in the next step; then rank r holds
   chunk r of the sum. All-gather, n-1 steps: the finished chunks go round once more, now copied instead of added.
3. All-reduce is both: 2(n-1) steps and 2(n-1)/n · S bytes per rank, and no algorithm can do with fewer bytes.
4. Where n does not divide, rank r sends 2S - |chunk r| - |chunk r+1|: each phase passes on all chunks but one.
5. A step is one message of at most ceil(S/n), and its receive is posted before its send: no rank waits for a rank that
   waits for it, also where a send blocks until it is received.

Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.peers import Peers, split
from course_lib.collectives.by_hand.validation import check_same


@torch.no_grad()
def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, check: bool = True) -> None:
    """Replace ``tensor`` [any shape] by its sum over the group's ranks, on each of them.

    Raises:
        ValueError: ranks that do not agree, a tensor that is not contiguous, a group without this rank.
    """
    peers = Peers(group)
    check_same(peers, "ring.all_reduce", tensor, check=check)
    chunks = split(tensor, peers.size)
    _add_round(chunks, peers)
    _copy_round(chunks, peers)


def _add_round(chunks: list[torch.Tensor], peers: Peers) -> None:
    """n-1 steps, after which ``chunks[r]`` of rank r is the sum over the ranks; the other chunks hold partial sums."""
    n, left, right = peers.size, (peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size
    buffer = torch.empty_like(max(chunks, key=len))  # one for all steps: fresh memory costs as much as the adding
    for step in range(n - 1):
        outgoing, incoming = chunks[(peers.rank - step - 1) % n], chunks[(peers.rank - step - 2) % n]
        peers.exchange(outgoing, right, buffer[: len(incoming)], left)
        incoming += buffer[: len(incoming)]


def _copy_round(chunks: list[torch.Tensor], peers: Peers) -> None:
    """n-1 steps, after which every rank has every ``chunks[i]`` as rank i had it."""
    n, left, right = peers.size, (peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size
    for step in range(n - 1):
        peers.exchange(chunks[(peers.rank - step) % n], right, chunks[(peers.rank - step - 1) % n], left)
