"""FSDP's sharded state in the form of torch.distributed.checkpoint (DCP): each rank writes its shards, any number of
ranks reads the pieces that it needs. A model that is not sharded is saved the same way.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from course_lib.checkpoints import pickles
from course_lib.checkpoints.errors import CheckpointError, system_error
from course_lib.checkpoints.manifest import stays_inside

FOLDER = "fsdp"


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, trainable_only: bool) -> dict[str, Any]:
    """The model's and the optimizer's state as DCP saves it: this rank's shards, under the names of the whole model."""
    options = StateDictOptions(ignore_frozen_params=trainable_only)
    found: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if optimizer is not None:
        if not optimizer.state:
            _begin(model, optimizer, options)
        found["optim"] = get_optimizer_state_dict(model, optimizer, options=options)
    return found


def _begin(model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> None:
    """Give an optimizer that has not stepped yet its state. DCP does so by a step without gradients and counts it: a run
    saved before its first step would take Adam's first bias correction for the second."""
    get_optimizer_state_dict(model, optimizer, options=options)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def write(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, trainable_only: bool) -> None:
    """Collective: every rank writes its shards below ``path``."""
    with alone_is_fine():
        dcp.save(state(model, optimizer, trainable_only), storage_writer=Writer(path / FOLDER))


def write_copy(writer: Writer, copied: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Collective over ``group``: every rank writes what its ``writer`` has staged. None: this process is alone."""
    if group is not None:
        dcp.save(copied, storage_writer=writer, process_group=group)
        return
    with alone_is_fine():
        dcp.save(copied, storage_writer=writer, no_dist=True)


def read(
    path: Path,
    names: Collection[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    trainable_only: bool,
) -> None:
    """Collective: every rank reads its shards from a checkpoint whose files are ``names``, in place."""
    here = state(model, optimizer, trainable_only)
    with alone_is_fine():
        dcp.load(here, storage_reader=Reader(path, names), planner=Planner())
    options = StateDictOptions(ignore_frozen_params=trainable_only, strict=not trainable_only)
    set_model_state_dict(model, here["model"], options=options)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, here["optim"], options=options)


def weights(path: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The whole model's tensors, by name, in this process; no process group needed."""
    reader = Reader(path, names)
    found = {
        key: torch.empty(about.size, dtype=about.properties.dtype)
        for key, about in reader.read_metadata().state_dict_metadata.items()
        if key.startswith("model.") and isinstance(about, TensorStorageMetadata)
    }
    with alone_is_fine():
        dcp.load(found, storage_reader=reader, planner=Planner(), no_dist=True)
    return {key.removeprefix("model."): tensor for key, tensor in found.items()}


@contextmanager
def alone_is_fine() -> Iterator[None]:
    """DCP warns a process that has no process group; it is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


class Writer(dcp.FileSystemWriter):
    """DCP's writer of files; what the system says of a full disk comes through."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            told = system_error(error)
            raise error if told is None else told from error


class Reader(dcp.FileSystemReader):
    """DCP's reader of files, which unpickles its metadata blindly and follows any path in it; this one does neither."""

    def __init__(self, checkpoint: Path, names: Collection[str]) -> None:
        super().__init__(checkpoint / FOLDER)
        self.folder, self.names = checkpoint / FOLDER, set(names)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        told = pickles.metadata(self.folder / ".metadata")
        try:
            for info in told.storage_data.values():
                name = os.fspath(info.relative_path)
                if not stays_inside(name) or f"{FOLDER}/{name}" not in self.names:
                    raise CheckpointError(f"{self.folder / '.metadata'} leads to {name!r}: tampered with.")
            told.storage_meta = told.storage_meta or dcp.metadata.StorageMeta()
            told.storage_meta.load_id = self.load_id
        except (AttributeError, TypeError) as error:
            raise CheckpointError(f"{self.folder / '.metadata'} is no metadata of a checkpoint: {error}.") from error
        return told


class Planner(dcp.DefaultLoadPlanner):
    """DCP's planner unpickles what is no tensor (a learning rate, say) blindly; this one has looked at it before."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        pickles.torch_bytes(value, f"The checkpoint's {read_item.dest_index.fqn!r}")
        value.seek(0)
        super().load_bytes(read_item, value)
