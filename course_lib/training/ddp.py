"""Data parallelism with PyTorch's DistributedDataParallel.

Every rank holds the whole model, trains on its slice of the global batch, and averages gradients with the others
during the backward pass (Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.launch import rank_device
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.training.command_line import run
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome


def train(*, steps: int = 20, global_batch: int = 8, seq_len: int = 128, lr: float = 1e-3) -> Outcome:
    """Train the tiny Llama under DistributedDataParallel; the default process group must be up.

    Args:
        steps: optimizer steps.
        global_batch: sequences in one step, over all ranks.
        seq_len: tokens per sequence.
        lr: AdamW's learning rate.
    """
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), rank_device()
    micro_batch_size(steps, global_batch, world_size)  # raises where the shares would be unequal
    model = tiny_llama(seed=rank).to(device)  # each rank starts from other weights ...
    model = DistributedDataParallel(model)  # ... until this broadcasts rank 0's
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    observation, losses = observe(model, optimizer), []
    for step in range(steps):
        share = sample_batch(step, global_batch=global_batch, seq_len=seq_len, rank=rank, world_size=world_size)
        share = share.to(device)
        with observation.step(tokens=share.numel()):
            loss = model(input_ids=share, labels=share).loss
            loss.backward()  # the all-reduces start in here, bucket by bucket
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)  # only to report the loss of the whole batch: DDP does not need it
        losses.append(total.item() / world_size)
    return outcome(observation, losses, type(model).__name__)


if __name__ == "__main__":
    run(train)
