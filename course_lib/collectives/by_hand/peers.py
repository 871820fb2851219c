"""The ranks of a group as an algorithm sees them: numbered from 0, with a way to send and to receive.

An algorithm counts the group's ranks from 0 to n-1; torch.distributed wants global ranks. The translation stands here,
and so does the one rule against deadlocks: in an exchange the receive is posted before the send starts. A send may
block until its receiver is ready (gloo's always does, MPI's does for large messages): if every rank of a ring sent
first, all would wait for ever.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand import traffic


class Peers:
    """The group that this rank belongs to.

    Args:
        group: as ``torch.distributed`` takes it; ``None`` is all ranks.

    Attributes:
        ranks: global ranks of the members.
        rank: this rank's number in the group.
        size: how many members.

    Raises:
        ValueError: this rank is no member.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group that it was given: "
                "call a group's collectives only on the ranks that the group was made of."
            )
        self.group = group
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.size = len(self.ranks)

    def member(self, root: int) -> int:
        """The number in the group of global rank ``root``.

        Raises:
            ValueError: it is not in the group.
        """
        if root not in self.ranks:
            raise ValueError(
                f"root={root!r} is not in the group of ranks {self.ranks}: "
                "name one of these, by its global rank as torch.distributed does."
            )
        return self.ranks.index(root)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to member ``to``; may block until it receives. An empty tensor is not sent."""
        if tensor.numel():
            traffic.count(tensor, self.ranks[to])
            dist.send(tensor, self.ranks[to], group=self.group)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive from member ``source`` into ``tensor``, and wait for it."""
        if tensor.numel():
            dist.recv(tensor, self.ranks[source], group=self.group)

    def receive_any(self, tensor: torch.Tensor) -> int:
        """Receive from whichever member's message comes first; returns its number. NCCL cannot do this."""
        return self.ranks.index(dist.recv(tensor, group=self.group))

    def exchange(self, outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
        """Send to one member while receiving from another (or the same); returns when both are done.

        One batch: NCCL starts its operations together, so neither blocks the other.
        """
        operations = []
        if incoming.numel():
            operations.append(dist.P2POp(dist.irecv, incoming, self.ranks[source], self.group))
        if outgoing.numel():
            traffic.count(outgoing, self.ranks[to])
            operations.append(dist.P2POp(dist.isend, outgoing, self.ranks[to], self.group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


def split(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Return ``parts`` views of the flattened tensor, in order; the first ``numel % parts`` hold one element more."""
    return list(tensor.view(-1).tensor_split(parts))
