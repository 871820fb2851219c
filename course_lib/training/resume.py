"""Resuming the sharded training programs from a folder of checkpoints."""

from __future__ import annotations

import torch


def check_saving(checkpoint_dir: str, save_every: int, resume: bool) -> None:
    """Raise ValueError for a negative `save_every`, or for saving or resuming without a folder."""
    if save_every < 0:
        raise ValueError(f"save_every={save_every}: give a number of steps, 0 not to save.")
    if not checkpoint_dir and (save_every or resume):
        raise ValueError("save_every and resume need a folder: give it as checkpoint_dir.")


def load_newest(
    checkpoint_dir: str, data: dict[str, int], *, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Load the newest complete checkpoint, if there is one, and return how many steps it has done (0 without one).

    Args:
        checkpoint_dir: folder of checkpoints.
        data: what decides the order of the data; it was saved as the checkpoint's `extra`.
        model, optimizer: to load it into, as in `course_lib.checkpoints.load`.
    """
    from course_lib.checkpoints import latest, load  # few runs need them

    newest = latest(checkpoint_dir)
    if newest is None:
        return 0
    saved = load(newest, model=model, optimizer=optimizer)
    for name, value in data.items():
        if saved[name] != value:
            raise ValueError(f"{name}={value}: {newest} was trained with {saved[name]}, another order of the data.")
    return saved["step"]
