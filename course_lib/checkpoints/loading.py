"""``load``: a checkpoint into a model or an engine, at any number of ranks, after everything in it has been looked at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from course_lib.checkpoints import folder, fsdp, manifest, state, wholeness, zero
from course_lib.checkpoints.errors import CheckpointError
from course_lib.checkpoints.manifest import Manifest
from course_lib.checkpoints.saving import check_target
from course_lib.checkpoints.together import place, share, together


def load(
    where: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    engine: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    kind: str | None = None,
) -> dict[str, Any]:
    """Load a checkpoint, or a folder's newest whole one; every rank calls it. Returns ``extra``, and ``step`` in it.

    Before the model is touched, every byte is held against its checksum, the model's names, shapes and dtypes against
    the saved ones, and no pickle is opened that names anything but the few classes that belong there. The number of ranks
    may be another than when it was saved; the random numbers come back where it is the same.

    Raises:
        ValueError: arguments that do not go together.
        CheckpointError: none there, another model, another kind, a newer format, truncated, tampered with.
    """
    model, engine = check_target(model, engine, optimizer, scheduler, kind)
    rank, world_size = place()
    path = Path(where)
    with together(f"{path} was not loaded", path):
        path = folder.find(where) if rank == 0 else path
    path = share(path)
    with together(f"{path} was not loaded", path):
        told = wholeness.whole(path)
        _check_fit(path, told, model, engine, optimizer)
    with together(f"{path} was not loaded", path):
        _check_contents(path, told, rank, world_size)
    with together(f"{path} was not loaded", path):
        if engine is None:
            fsdp.read(path, list(told.files), model, optimizer, told.trainable_only)
        else:
            zero.read(path, told, engine)
    with together(f"{path} was not loaded", path):
        state.read(path, rank, same_ranks=world_size == told.world_size, scheduler=scheduler)
    return {**told.extra, "step": told.step}


def _check_fit(path: Path, told: Manifest, model: Any, engine: Any, optimizer: Any) -> None:
    if told.kind != ("fsdp" if engine is None else "zero"):
        how = {"fsdp": "for FSDP: load it into a model", "zero": "by DeepSpeed: load it into an engine"}[told.kind]
        raise CheckpointError(f"{path} was saved {how}, or carry its weights over with to_hugging_face.")
    other = manifest.difference(told.model, manifest.fingerprint(model if engine is None else engine.module))
    if other:
        raise CheckpointError(f"{path} is of another model: {other}.")
    if optimizer is not None and type(optimizer).__name__ != told.optimizer:
        holds = f"the state of {told.optimizer}" if told.optimizer else "no optimizer's state"
        raise CheckpointError(f"{path} holds {holds}, and this run's optimizer is {type(optimizer).__name__}.")


def _check_contents(path: Path, told: Manifest, rank: int, world_size: int) -> None:
    """This rank's share of the files: every byte, then every name in a pickle."""
    mine = sorted(told.files)[rank::world_size]
    try:
        wholeness.check_bytes(path, told, mine)
        vet(path, told, mine)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{folder.older_whole(path)}") from error


def vet(path: Path, told: Manifest, names: list[str]) -> None:
    """Raise CheckpointError where a pickle among the files ``names`` would look up anything that does not belong there."""
    if told.kind == "zero":
        zero.vet(path, names)
    elif f"{fsdp.FOLDER}/.metadata" in names:
        fsdp.Reader(path, told.files).read_metadata()
