"""``save`` and ``load``, around torch.distributed.checkpoint (DCP): each rank writes its shards, and any number of ranks
reads the pieces that it needs. A model that is not sharded is saved the same way.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from course_lib.checkpoints import folder
from course_lib.checkpoints.errors import CheckpointError, gather, rank_and_world_size, share, system_error, together
from course_lib.checkpoints.folder import Manifest
from course_lib.files import write_atomically


def save(
    root: str | os.PathLike[str],
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Save a checkpoint as ``root/step-00000010``; every rank calls it, and gets its path when it is complete.

    Whatever happens meanwhile, the older checkpoints stay complete. The state of the random numbers is saved, too.

    Args:
        root: a folder that all ranks share; made if it is not there. One run saves into it.
        model, optimizer: sharded by ``fully_shard``, or plain.
        extra: plain JSON that ``load`` gives back: the position in the data, say.
        keep: complete checkpoints to keep, this one included; older ones are removed.

    Raises:
        CheckpointError: the disk is full, the folder cannot be written or is not shared, another save is under way.
    """
    rank, world_size = rank_and_world_size()
    root = Path(root)
    failed = f"step {step} was not saved in {root}"
    # The part has a name of its own, for orphans of a killed run may still write into an older part. Gathering it also
    # keeps this save from starting before every rank has left the last one.
    part = root / f"{folder.name(step)}.part-{gather(uuid4().hex[:8])[0]}"
    with ExitStack() as until_the_end:
        with together(failed):
            if rank == 0:
                until_the_end.enter_context(_only_save(part))
        with together(failed):  # a rank that does not share the folder fails here: it does not see the part
            own = BytesIO()
            torch.save({"random": random_state(), "scheduler": scheduler and scheduler.state_dict()}, own)
            torch.load(BytesIO(own.getvalue()), weights_only=True)  # refuses now what no load would take
            write_atomically(part / f"rank-{rank:05d}.pt", own.getvalue(), durable=True)
        with together(failed):
            dcp.save(sharded_state(model, optimizer), storage_writer=_Writer(part))
            names = sorted(path.name for path in part.iterdir())
        names = share(names)
        with together(failed):  # the ranks share the work
            paths = [part / name for name in names[rank::world_size]]
            files = {path.name: [path.stat().st_size, folder.digest(path)] for path in paths}
        files = {name: entry for some in gather(files) for name, entry in some.items()}
        manifest = Manifest(step, world_size, fingerprint(model), files, extra or {})
        with together(failed):
            if rank == 0:
                folder.write_manifest(part, manifest)
                folder.publish(part, step)
        with together(f"step {step} was saved, but older ones could not be removed"):
            if rank == 0:
                folder.prune(root, step, keep)
    return root / folder.name(step)


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
        CheckpointError: none there, another model, truncated or changed.
    """
    rank, world_size = rank_and_world_size()
    failed = f"{where} was not loaded"
    path = Path(where)
    with together(failed):
        if rank == 0 and not (path / folder.MANIFEST).exists():
            path = folder.latest(where)
            if path is None:
                raise CheckpointError(f"{where} has no complete checkpoint.")
    path = share(path)
    with together(failed):
        manifest = folder.read_manifest(path)
        saved, here = manifest.model, fingerprint(model)
        for name in {**saved, **here}:
            there, ours = saved.get(name, "missing"), here.get(name, "missing")
            if there != ours:
                raise CheckpointError(f"{path} is of another model: {name!r} is {there} there, and {ours} here.")
        for name in sorted(manifest.files)[rank::world_size]:  # the ranks share the work
            if folder.digest(path / name) != manifest.files[name][1]:
                raise CheckpointError(
                    f"{path / name} has other bytes than when it was saved. Remove {path} to go on from an older one."
                )
    same_ranks = world_size == manifest.world_size
    with together(failed):
        own = torch.load(path / f"rank-{rank if same_ranks else 0:05d}.pt", weights_only=True)
        if scheduler is not None and own["scheduler"] is None:
            raise CheckpointError(f"{path} holds no scheduler's state: it was saved without one.")
    with together(failed):
        state = sharded_state(model, optimizer)
        dcp.load(state, checkpoint_id=path, planner=_SafePlanner())  # into the shards, in place
        set_model_state_dict(model, state["model"])
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, state["optim"])
        if scheduler is not None:
            scheduler.load_state_dict(own["scheduler"])
        if same_ranks:  # else each rank keeps its own: dropout differs in any case
            set_random_state(own["random"])
    return {**manifest.extra, "step": manifest.step}


@contextmanager
def _only_save(part: Path) -> Iterator[None]:
    """Make the part, and hold its folder's lock meanwhile; what was not published is removed. For rank 0.

    The system releases the lock when the process dies, so whoever gets it may remove the parts that it finds.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(part.parent / ".lock").acquire(timeout=0)
    except Timeout:
        raise CheckpointError(f"Another save into {part.parent} is under way: give each run its own folder.") from None
    with lock:
        try:
            folder.sweep(part.parent)
            part.mkdir()
            yield
        finally:
            shutil.rmtree(part, ignore_errors=True)  # where it was published it is gone already


# What a checkpoint holds.


def sharded_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the model's and the optimizer's state as DCP saves it: this rank's shards, under the whole model's names."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        if not optimizer.state:
            get_optimizer_state_dict(model, optimizer)  # DCP makes the moments by a step without gradients
            for moments in optimizer.state.values():
                if "step" in moments:
                    moments["step"].zero_()  # else the first real step would have Adam's second bias correction
        state["optim"] = get_optimizer_state_dict(model, optimizer)
    return state


def fingerprint(model: torch.nn.Module) -> dict[str, str]:
    """Return each tensor's dtype and whole shape, however the model is wrapped and sharded."""
    state = get_model_state_dict(model)
    return {name: f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for name, tensor in state.items()}


def random_state() -> dict[str, Any]:
    """Where this rank's generators stand: PyTorch's on the CPU and on its GPU, Python's, NumPy's."""
    kind, keys, *position = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *position),  # torch.load takes no arrays with weights_only
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put this rank's generators where ``random_state`` found them."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


class _Writer(dcp.FileSystemWriter):
    """DCP's writer of files, except that a full disk raises the system's OSError."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # on its way to the other ranks it would lose its cause
            raise (system_error(error) or error) from None


class _SafePlanner(dcp.DefaultLoadPlanner):
    """DCP's planner, except that it unpickles plain values only."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises for anything else
        value.seek(0)
        super().load_bytes(read_item, value)
