"""A model's and an optimizer's state in the format of torch.distributed.checkpoint (DCP): each rank writes its shards,
and any number of ranks reads the pieces that it needs. An unsharded model is saved the same way.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from course_lib.checkpoints.errors import CheckpointError, system_error

FOLDER = "fsdp"
SCHEDULER = "scheduler.pt"


def sharded_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, trainable_only: bool
) -> dict[str, Any]:
    """The model's and the optimizer's state as DCP saves it: this rank's shards, under the names of the whole model."""
    options = StateDictOptions(ignore_frozen_params=trainable_only)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if optimizer is not None:
        if not optimizer.state:
            _initialize(model, optimizer, options)
        state["optim"] = get_optimizer_state_dict(model, optimizer, options=options)
    return state


def _initialize(model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> None:
    """Give an optimizer that has not stepped yet its state. DCP does so by a step without gradients and counts it: a run
    saved before its first step would take Adam's first bias correction for the second."""
    get_optimizer_state_dict(model, optimizer, options=options)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def write(writer: Writer, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Collective over ``group``: every rank writes its shards. Without a process group this process is alone."""
    with _alone_is_fine():
        dcp.save(state, storage_writer=writer, process_group=group)


def read(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, trainable_only: bool) -> None:
    """Collective: every rank reads its shards from a checkpoint, in place."""
    state = sharded_state(model, optimizer, trainable_only)
    with _alone_is_fine(), weights_only():
        dcp.load(state, checkpoint_id=path / FOLDER)
    options = StateDictOptions(ignore_frozen_params=trainable_only, strict=not trainable_only)
    set_model_state_dict(model, state["model"], options=options)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options)


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The whole model's tensors, by name, in this process; no process group needed."""
    reader = dcp.FileSystemReader(path / FOLDER)
    state = {
        key: torch.empty(about.size, dtype=about.properties.dtype)
        for key, about in reader.read_metadata().state_dict_metadata.items()
        if key.startswith("model.") and isinstance(about, TensorStorageMetadata)
    }
    with _alone_is_fine(), weights_only():
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix("model."): tensor for key, tensor in state.items()}


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """DCP warns a process that has no process group; here that is on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


class Writer(dcp.FileSystemWriter):
    """DCP's writer of files, except that a full disk raises the system's OSError."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint / FOLDER)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = system_error(error)
            raise error if cause is None else cause from error


@contextmanager
def weights_only() -> Iterator[None]:
    """Every ``torch.load`` in the block takes tensors and plain values only, even in a library that asks for
    ``weights_only=False``, as DCP does."""
    variable = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def random_state() -> dict[str, Any]:
    """Where this rank's generators stand: PyTorch's on the CPU and on its GPU, Python's, NumPy's."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": (torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put this rank's generators where ``random_state`` found them."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))


def write_run_state(path: Path, rank: int, scheduler: Any) -> None:
    """Write this rank's random numbers, and from rank 0 the scheduler's state.

    Raises OSError for a full disk, and CheckpointError for a scheduler whose state ``weights_only=True`` would not load.
    """
    save_file(random_state(), path / _random_file(rank))
    if scheduler is not None and rank == 0:
        save_file(scheduler.state_dict(), path / SCHEDULER)
        try:
            torch.load(path / SCHEDULER, weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{SCHEDULER} holds an object that cannot be read back without running its code: save plain numbers, "
                "strings, lists and tensors."
            ) from error


def save_file(content: Any, path: Path) -> None:
    """``torch.save`` through Python's own file, whose errors say what the system said."""
    with path.open("wb") as file:
        torch.save(content, file)


def read_run_state(path: Path, rank: int, *, same_ranks: bool, scheduler: Any) -> None:
    """Load the scheduler's state, and the random numbers if there are as many ranks as were saved.

    With another number of ranks each keeps its own random numbers: dropout then differs in any case.
    """
    if scheduler is not None:
        if not (path / SCHEDULER).exists():
            raise CheckpointError(f"{path} holds no scheduler's state: it was saved without one.")
        scheduler.load_state_dict(torch.load(path / SCHEDULER, weights_only=True))
    if same_ranks:
        set_random_state(torch.load(path / _random_file(rank), weights_only=True))


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.pt"
