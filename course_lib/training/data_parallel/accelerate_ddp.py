"""The same training with Hugging Face Accelerate: ``prepare`` wraps, ``accumulate`` decides when gradients travel."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from course_lib.models import tiny_llama
from course_lib.models.data import GlobalBatches
from course_lib.observe import observe
from course_lib.training.command_line import run
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome


def train(
    *,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    lr: float = 1e-3,
    accumulate: int = 1,
    seed: int = 0,
    expect_ranks: int = 0,
) -> Outcome:
    """Train the tiny Llama with Accelerate, on one rank or many.

    Args:
        steps, global_batch, seq_len, lr, accumulate, seed: as in ``course_lib.training.data_parallel.ddp``.
        expect_ranks: refuse to train on another number of ranks; 0 takes what comes. ``accelerate launch --cpu
            --num_processes 2`` starts one process without a word, and this is how a program notices.

    Raises:
        ValueError: no steps, or the batch does not divide into ranks times micro-batches.
        RuntimeError: another number of ranks than expected.
    """
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=accumulate)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    if expect_ranks and world_size != expect_ranks:
        raise RuntimeError(
            f"asked for {expect_ranks} ranks and Accelerate gave {world_size}. On a machine without GPUs launch with "
            "`torchrun --nproc_per_node N` or `accelerate launch --multi_gpu --num_processes N`."
        )
    micro_batch = micro_batch_size(steps=steps, global_batch=global_batch, ranks=world_size, accumulate=accumulate)
    model = tiny_llama(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    # prepare() deals the loader's batches out in turn, so each step's global batch is the same whatever the ranks
    rows = GlobalBatches(steps, global_batch=global_batch, seq_len=seq_len, seed=seed)
    loader = DataLoader(rows, batch_size=micro_batch, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = observe(model, optimizer.optimizer)  # the AdamW inside Accelerate's wrapper
    losses, total = [], torch.zeros((), device=accelerator.device)
    batches = iter(loader)
    for _ in range(steps):
        with seen.step(tokens=micro_batch * accumulate * seq_len):
            for _ in range(accumulate):
                batch = next(batches)
                with accelerator.accumulate(model):  # no_sync for all but the last
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)  # divides by the number of micro-batches
                    optimizer.step()  # does nothing before the last one
                    optimizer.zero_grad()
                total += loss.detach() / accumulate
        losses.append(accelerator.reduce(total, "mean").item())
        total = torch.zeros_like(total)
    return Outcome(
        losses, type(model).__name__, rank, world_size, seen.median_step, seen.tokens_per_second, seen.memory,
        extra={"distributed_type": str(accelerator.distributed_type), "device": str(accelerator.device)},
    )  # fmt: skip


if __name__ == "__main__":
    run(train, own_group=False)
