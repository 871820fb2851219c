"""Faults that a lesson can plant in a resumable run: a batch that spikes, a rank that dies, a resume that forgets.

Each does nothing unless an argument of ``train`` asks for it."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from course_lib.training.resumable.state import Progress, set_dropout

FORGET = ("", "rng", "data", "scheduler", "dropout", "optimizer")
SPOILED_LOSS = 100.0  # the factor of a spoiled batch's loss: without clipping, Adam's second moments remember it long


def spoiled(batch: torch.Tensor, seed: int) -> torch.Tensor:
    """Random bytes in the place of a batch: what a broken file or a wrong offset looks like to a model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, batch.shape, generator=generator).to(batch.device)


def die(step: int, die_at: int, rank: int, die_rank: int) -> None:
    """SIGKILL to this process before update ``die_at``; only in the first life of a job that torchrun restarts."""
    if step == die_at and rank == die_rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def forget_after_load(forget: str, model: Any, at: Progress) -> None:
    """What a careless resume gets wrong once the checkpoint is loaded; ``parts_to_load`` has the other two."""
    if forget == "rng":
        at.drawn = 0  # what a program does that seeds its generators when it starts
    elif forget == "data":
        at.position = 0  # a loader that starts with the first batch
    elif forget == "dropout":
        set_dropout(model, 0.0)  # a configuration file that was not the same


def parts_to_load(forget: str, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """The optimizer and the scheduler for ``checkpoints.load``, without the one that is to be forgotten."""
    parts = {"optimizer": optimizer, "scheduler": scheduler}
    return {name: part for name, part in parts.items() if name != forget}
