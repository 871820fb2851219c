"""Two all-reduces written out over send and receive: through one rank, and round a ring.

Both replace a contiguous tensor by its sum over all ranks, on each of them. n ranks, a tensor of S bytes:

- `through_the_root`: rank 0 sends and receives (n-1) · S through its one link, every other rank S.
- `ring`: the tensor is cut into n chunks; 2(n-1) steps, and 2(n-1)/n · S bytes per rank, which no algorithm can undercut
  (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
"""

from __future__ import annotations

import torch
import torch.distributed as dist


@torch.no_grad()
def through_the_root(tensor: torch.Tensor) -> None:
    """Rank 0 receives from one rank after the other, adds, and sends the sum out, again to one after the other."""
    n, rank = dist.get_world_size(), dist.get_rank()
    if rank != 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    other = torch.empty_like(tensor)
    for source in range(1, n):
        dist.recv(other, source)
        tensor += other
    for to in range(1, n):
        dist.send(tensor, to)


@torch.no_grad()
def ring(tensor: torch.Tensor) -> None:
    """In the first n-1 steps what arrives from the left is added and passed on; in the next n-1 it is copied.

    After the first half rank r holds chunk r of the sum.
    """
    assert tensor.is_contiguous(), "chunks of another layout would be copies"
    n, rank = dist.get_world_size(), dist.get_rank()
    chunks = tensor.view(-1).tensor_split(n)  # views; where n does not divide, the first ones hold one element more
    buffer = torch.empty_like(chunks[0])  # one for all steps: fresh memory costs as much as the adding
    for step in range(n - 1):
        incoming = chunks[(rank - step - 2) % n]
        _exchange(chunks[(rank - step - 1) % n], buffer[: len(incoming)])
        incoming += buffer[: len(incoming)]
    for step in range(n - 1):
        _exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n])


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to the right while receiving from the left.

    The receive comes first: a send may block until it is received, and if every rank sent first, all would wait for
    ever. As one batch, for NCCL starts its operations together.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    operations = []
    if incoming.numel():
        operations.append(dist.P2POp(dist.irecv, incoming, (rank - 1) % n))
    if outgoing.numel():
        operations.append(dist.P2POp(dist.isend, outgoing, (rank + 1) % n))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
