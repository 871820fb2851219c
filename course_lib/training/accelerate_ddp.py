"""Data parallelism with Hugging Face Accelerate: ``prepare`` wraps the model in DDP and deals out the loader's batches."""

from __future__ import annotations

import os
from itertools import islice

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from course_lib.models import tiny_llama
from course_lib.models.data import GlobalBatches
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
    expect_ranks: int = 0,
    save_to: str = "",
) -> Outcome:
    """Train the tiny Llama with Accelerate, on one rank or many.

    Args:
        steps: optimizer steps.
        global_batch: sequences in one step, over all ranks and micro-batches.
        seq_len: tokens per sequence.
        lr: AdamW's learning rate.
        gradient_accumulation_steps: micro-batches per rank and step.
        expect_ranks: refuse to train unless DDP runs on as many ranks; 0 takes what comes. ``accelerate launch --cpu
            --num_processes 2`` starts one process without a word, and this is how a program notices.
        save_to: folder for the final state; empty to save nothing.

    Raises:
        RuntimeError: the model is not under DDP on as many ranks as expected.
    """
    few_gpus = torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    accelerator = Accelerator(cpu=few_gpus, gradient_accumulation_steps=gradient_accumulation_steps)
    micro_batch = micro_batch_size(steps, global_batch, accelerator.num_processes, gradient_accumulation_steps)
    model = tiny_llama(seed=accelerator.process_index)  # DDP will broadcast rank 0's weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    rows = GlobalBatches(steps, global_batch=global_batch, seq_len=seq_len)
    loader = DataLoader(rows, batch_size=micro_batch)  # per rank
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    if expect_ranks and not (is_ddp and accelerator.num_processes == expect_ranks):
        found = f"{type(model).__name__} on {accelerator.num_processes}"
        raise RuntimeError(f"expected DDP on {expect_ranks} ranks, found {found}: does the launcher start them?")
    observation, losses, batches = observe(model, optimizer), [], iter(loader)
    for _ in range(steps):
        with observation.step(tokens=micro_batch * gradient_accumulation_steps * seq_len):
            for batch in islice(batches, gradient_accumulation_steps):
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)  # divides by the number of micro-batches
                    optimizer.step()  # does nothing before the last of them
                    optimizer.zero_grad()
                losses.append(loss.detach())
    losses = accelerator.reduce(torch.stack(losses), "mean").view(steps, -1).mean(dim=1)  # of each step
    if save_to:
        accelerator.save_state(save_to)  # on every rank: each has a random state of its own
    kind = str(accelerator.distributed_type)
    return outcome(observation, losses.tolist(), type(model).__name__, distributed_type=kind)


if __name__ == "__main__":
    run(train, own_group=False)
