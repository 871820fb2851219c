"""Data parallelism with Hugging Face Accelerate: ``prepare`` wraps the model, ``accumulate`` decides when gradients are
reduced."""

from __future__ import annotations

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
    seed: int = 0,
    expect_ranks: int = 0,
) -> Outcome:
    """Train the tiny Llama with Accelerate, on one rank or many.

    Args:
        steps, global_batch, seq_len, lr, gradient_accumulation_steps, seed: as in ``course_lib.training.data_parallel.ddp``.
        expect_ranks: refuse to train on another number of ranks; 0 takes what comes. ``accelerate launch --cpu
            --num_processes 2`` starts one process without a word, and this is how a program notices.

    Raises:
        ValueError: no steps, or the batch does not divide into ranks times micro-batches.
        RuntimeError: another number of ranks than expected.
    """
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=gradient_accumulation_steps
    )
    world_size = accelerator.num_processes
    if expect_ranks and world_size != expect_ranks:
        raise RuntimeError(
            f"asked for {expect_ranks} ranks and Accelerate gave {world_size}. On a machine without GPUs launch with "
            "`torchrun --nproc_per_node N` or `accelerate launch --multi_gpu --num_processes N`."
        )
    micro_batch = micro_batch_size(
        steps=steps,
        global_batch=global_batch,
        ranks=world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    model = tiny_llama(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    # prepare() deals the loader's batches out in turn, so each step's global batch is the same whatever the ranks
    rows = GlobalBatches(steps, global_batch=global_batch, seq_len=seq_len, seed=seed)
    loader = DataLoader(rows, batch_size=micro_batch, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    observation = observe(model, optimizer.optimizer)  # the AdamW inside Accelerate's wrapper
    losses, total = [], torch.zeros((), device=accelerator.device)
    batches = iter(loader)
    for _ in range(steps):
        with observation.step(tokens=micro_batch * gradient_accumulation_steps * seq_len):
            for _ in range(gradient_accumulation_steps):
                batch = next(batches)
                with accelerator.accumulate(model):  # no_sync for all but the last
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)  # divides by the number of micro-batches
                    optimizer.step()  # does nothing before the last one
                    optimizer.zero_grad()
                total += loss.detach() / gradient_accumulation_steps
        losses.append(accelerator.reduce(total, "mean").item())
        total = torch.zeros_like(total)
    return outcome(
        observation,
        losses,
        type(model).__name__,
        distributed_type=str(accelerator.distributed_type),
        device=str(accelerator.device),
    )


if __name__ == "__main__":
    run(train, own_group=False)
