"""Everything through one rank: the algorithm that everybody writes first, and the yardstick for the ring.

1. Each rank sends what it has to the first, which receives from one rank after the other, and adds.
2. The first sends the sum out, again to one rank after the other.
3. It sends and receives (n-1) · S bytes through its one link, every other rank S.
4. Its time grows with n while the others wait: a ring moves the same sum with 2(n-1)/n · S per rank.

S: bytes of one rank's tensor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.peers import Peers
from course_lib.collectives.by_hand.validation import check_same


@torch.no_grad()
def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, check: bool = True) -> None:
    """Replace ``tensor`` by its sum over the group's ranks, on each of them.

    Raises:
        ValueError: ranks that do not agree, a tensor that is not contiguous, a group without this rank.
    """
    peers = Peers(group)
    check_same(peers, "naive.all_reduce", tensor, check=check)
    if peers.rank != 0:
        peers.send(tensor, 0)
        peers.receive(tensor, 0)
        return
    other = torch.empty_like(tensor)
    for source in range(1, peers.size):
        peers.receive(other, source)
        tensor += other
    for to in range(1, peers.size):
        peers.send(tensor, to)
