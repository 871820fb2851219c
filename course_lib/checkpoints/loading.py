"""``load``: a checkpoint into a model, at any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from course_lib.checkpoints import folder, sharded_state
from course_lib.checkpoints.errors import CheckpointError, rank_and_world_size, share, together
from course_lib.checkpoints.manifest import Manifest, check_bytes, check_sizes, difference, fingerprint


def load(
    where: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Load a checkpoint, or a folder's newest complete one; every rank calls it. Returns ``extra`` with ``step`` added.

    Before the model is touched, every file's checksum and the model's names, shapes and dtypes are compared with the
    saved ones. The number of ranks may differ from when it was saved; if it does not, random numbers are restored too.

    Raises:
        CheckpointError: none there, another model or optimizer, another format, truncated or changed.
    """
    rank, world_size = rank_and_world_size()
    path = Path(where)
    failed = f"{path} was not loaded"
    with together(failed, path):
        path = folder.find(where) if rank == 0 else path
    path = share(path)
    with together(failed, path):
        manifest = check_sizes(path)
        _check_fit(path, manifest, model, optimizer)
    with together(failed, path):
        try:
            check_bytes(path, manifest, sorted(manifest.files)[rank::world_size])  # the ranks share the work
        except CheckpointError as error:
            raise CheckpointError(f"{error}{folder.older_one(path)}") from error
    with together(failed, path):
        sharded_state.read(path, model, optimizer, manifest.trainable_only)
    with together(failed, path):
        same_ranks = world_size == manifest.world_size
        sharded_state.read_run_state(path, rank, same_ranks=same_ranks, scheduler=scheduler)
    return {**manifest.extra, "step": manifest.step}


def _check_fit(path: Path, manifest: Manifest, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    other = difference(manifest.model, fingerprint(model))
    if other:
        raise CheckpointError(f"{path} is of another model: {other}.")
    if optimizer is not None and type(optimizer).__name__ != manifest.optimizer:
        holds = f"the state of {manifest.optimizer}" if manifest.optimizer else "no optimizer's state"
        raise CheckpointError(f"{path} holds {holds}, and this run's optimizer is {type(optimizer).__name__}.")
