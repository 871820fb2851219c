"""Data parallelism with PyTorch's DistributedDataParallel.

Every rank holds the whole model, trains on its slice of the global batch, and averages gradients with the others
during the backward pass (Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704).
"""

from __future__ import annotations

from contextlib import nullcontext

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


def train(
    *,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    lr: float = 1e-3,
    gradient_accumulation_steps: int = 1,
    bucket_cap_mb: float | None = None,
    sync_every_micro_batch: bool = False,
    seed: int = 0,
    save_to: str = "",
) -> Outcome:
    """Train the tiny Llama under DistributedDataParallel; the default process group must be up.

    Args:
        steps: optimizer steps.
        global_batch: sequences in one optimizer step, over all ranks and micro-batches.
        seq_len: tokens a sequence.
        lr: AdamW's learning rate.
        gradient_accumulation_steps: micro-batches a rank; gradients travel only with the last one.
        bucket_cap_mb: size of a gradient bucket, MiB; None takes DDP's own: 25, and 1 for the first.
        sync_every_micro_batch: leave out ``no_sync``: the same losses for that many times the traffic.
        seed: of the weights and of the order of the data.
        save_to: file for rank 0 to save the weights in; empty to save nothing.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro_batch_size(
        steps=steps,
        global_batch=global_batch,
        ranks=world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    device = rank_device()
    # DDP broadcasts rank 0's weights when it wraps the model, so the ranks' own seeds need not agree
    model = DistributedDataParallel(tiny_llama(seed=seed + rank).to(device), bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    observation, losses = observe(model, optimizer), []
    for step in range(steps):
        batch = sample_batch(
            step, global_batch=global_batch, seq_len=seq_len, rank=rank, world_size=world_size, seed=seed
        ).to(device)
        with observation.step(tokens=batch.numel()):
            total = torch.zeros((), device=device)
            micro_batches = batch.chunk(gradient_accumulation_steps)
            for i, micro_batch in enumerate(micro_batches):
                last = i == len(micro_batches) - 1
                with nullcontext() if last or sync_every_micro_batch else model.no_sync():
                    loss = model(input_ids=micro_batch, labels=micro_batch).loss / gradient_accumulation_steps
                    loss.backward()  # the all-reduces start in here, bucket by bucket
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)  # for the report only: DDP does not need the global loss
        losses.append(total.item() / world_size)
    if save_to and rank == 0:
        torch.save(model.module.state_dict(), save_to)
    dist.barrier()  # nobody goes on before the file is whole
    return outcome(observation, losses, type(model).__name__)


if __name__ == "__main__":
    run(train)
