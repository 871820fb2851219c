"""One device trains on the whole global batch: every parallel program is compared with this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.training.command_line import run
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome


def train(
    build: Callable[[], Any] = tiny_llama,
    *,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    lr: float = 1e-3,
    gradient_accumulation_steps: int = 1,
) -> Outcome:
    """Train on one device.

    Args:
        build: makes the model; frozen weights stay as they are.
        steps: optimizer steps.
        global_batch: sequences in one optimizer step.
        seq_len: tokens a sequence.
        lr: AdamW's learning rate.
        gradient_accumulation_steps: micro-batches into which the batch is cut, one after another.
    """
    micro_batch_size(steps=steps, global_batch=global_batch, gradient_accumulation_steps=gradient_accumulation_steps)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build().to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    observation = observe(model, optimizer)
    losses = []
    for step in range(steps):
        batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len).to(device)
        with observation.step(tokens=batch.numel()):
            total = 0.0
            for micro_batch in batch.chunk(gradient_accumulation_steps):
                loss = model(input_ids=micro_batch, labels=micro_batch).loss / gradient_accumulation_steps
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
    return outcome(observation, losses, type(model).__name__)


if __name__ == "__main__":
    run(train, own_group=False)
