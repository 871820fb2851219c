"""Pairwise exchange: everybody has a different piece for everybody, and nobody can help anybody.

1. Step k = 1 … n-1: rank r sends its piece for rank r+k, and receives the piece that rank r-k has for it.
2. In every step each rank sends one message and receives one, so no link is asked for twice at a time; were all to begin
   with rank 0, then rank 1, … it would be ``naive`` with a queue in front of each rank in turn.
3. n-1 messages a rank and, pieces being equal, (n-1)/n · S bytes of the S bytes of its list: each byte travels once.
4. Pieces may differ in size: expert parallelism sends as many tokens to an expert as chose it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.agreement import one_a_rank, pieces_fit
from course_lib.collectives.by_hand.peers import Peers


@torch.no_grad()
def all_to_all(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    check: bool = True,
) -> None:
    """``outputs[i]`` becomes rank i's ``inputs[r]``, r being this rank's number: the transpose of who holds what.

    Args:
        outputs: a tensor a rank of the group, of the size that this rank has for us.
        inputs: a tensor a rank of the group; they keep their values, so no memory may be shared with ``outputs``.
        check: False leaves the header out (see ``agreement``).

    Raises:
        ValueError: pieces that do not fit, tensors that are not contiguous, a group without this rank, lists that do
            not hold one tensor a rank.
    """
    peers = Peers(group)
    inputs, outputs = (one_a_rank(peers, "all_to_all.all_to_all", pieces) for pieces in (inputs, outputs))
    pieces_fit(peers, "all_to_all.all_to_all", inputs, outputs, check=check)
    outputs[peers.rank].view(-1).copy_(inputs[peers.rank].view(-1))
    for step in range(1, peers.size):
        to, source = (peers.rank + step) % peers.size, (peers.rank - step) % peers.size
        peers.exchange(inputs[to], to, outputs[source], source)
