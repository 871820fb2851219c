"""``save`` and ``save_async``: all ranks write one checkpoint into a temporary folder, which rank 0 renames at the end."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from course_lib.checkpoints import folder, manifest
from course_lib.checkpoints.errors import CheckpointError, gather, rank_and_world_size, share, together
from course_lib.checkpoints.manifest import Manifest, digest, files_in, fingerprint
from course_lib.checkpoints.sharded_state import Writer, sharded_state, write, write_run_state


def save(
    root: str | os.PathLike[str],
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    keep: int = 2,
    trainable_only: bool = False,
) -> Path:
    """Save a checkpoint as ``root/step-00000010``; every rank calls it, and gets its path when it is complete.

    Whatever happens meanwhile, the older checkpoints stay complete. The state of the random numbers is saved, too.

    Args:
        root: a folder that all ranks share; made if it is not there. One run saves into it.
        step: optimizer steps done.
        model: sharded by ``fully_shard``, or plain.
        optimizer: whose state to save.
        scheduler: a learning-rate scheduler of PyTorch's.
        extra: plain JSON that ``load`` gives back: the position in the data, say.
        keep: complete checkpoints to keep, this one included; older ones are removed.
        trainable_only: leave frozen parameters out (LoRA: a few MB instead of the whole model).

    Raises:
        ValueError: a bad ``step``, ``keep`` or ``extra``, or a quantized model without ``trainable_only``.
        CheckpointError: the disk is full, the folder cannot be written or is not shared, another save is under way.
    """
    head = _head(step, model, optimizer, extra, keep, trainable_only)
    draft = _Draft(root, step)
    with draft.writing() as path:
        write(Writer(path), sharded_state(model, optimizer, trainable_only))
    with draft.writing() as path:
        write_run_state(path, rank_and_world_size()[0], scheduler)
    return draft.publish(head, keep)


def save_async(
    root: str | os.PathLike[str],
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    keep: int = 2,
    trainable_only: bool = False,
) -> Future[Path]:
    """``save`` while training goes on: the state is copied to host memory, then written by a thread.

    Returns when the copy is taken; ``.result()`` waits for the path, and raises CheckpointError where ``save`` would.
    Takes host memory for one copy of this rank's shards. One at a time: wait for the last before the next, and before
    the process group goes down.
    """
    head = _head(step, model, optimizer, extra, keep, trainable_only)
    draft = _Draft(root, step)
    with draft.writing() as path:
        write_run_state(path, rank_and_world_size()[0], scheduler)
    with draft.writing() as path:
        writer = Writer(path)
        copied = writer.stage(sharded_state(model, optimizer, trainable_only))
    # No thread starts before every rank has come this far: one without its peers would wait for them for ever, and make
    # folders again that rank 0 has just removed. The thread's collectives must not mix with the training's, so it gets a
    # group of its own, on the host.
    group = dist.new_group(backend="gloo") if rank_and_world_size()[1] > 1 else None
    done: Future[Path] = Future()

    def finish() -> None:
        result: Path | BaseException
        try:
            with draft.writing(group):
                write(writer, copied, group)
            result = draft.publish(head, keep, group)
        except BaseException as error:  # carried to whoever asks for the result
            result = error
        if group is not None:
            dist.destroy_process_group(group)  # before anybody goes on and takes the whole group down
        done.set_exception(result) if isinstance(result, BaseException) else done.set_result(result)

    threading.Thread(target=finish, name=f"checkpoint of step {step}").start()
    return done


def _head(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any] | None,
    keep: int,
    trainable_only: bool,
) -> Manifest:
    if hasattr(model, "zero_optimization_stage"):  # its stage 3 would be saved as empty tensors
        raise ValueError("a DeepSpeed engine saves itself: call its save_checkpoint.")
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
    try:
        plain = json.loads(json.dumps(extra or {})) == (extra or {})
    except (TypeError, ValueError):
        plain = False
    if not plain or not isinstance(extra or {}, dict):
        raise ValueError("extra= must be plain JSON: a dict with names of str, numbers, strings, lists.")
    if not trainable_only:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(f"{name} is quantized: save with trainable_only=True, its base comes from elsewhere.")
    return Manifest(
        step=step,
        world_size=rank_and_world_size()[1],
        model=fingerprint(model),
        extra=extra or {},
        optimizer=type(optimizer).__name__ if optimizer is not None else "",
        trainable_only=trainable_only,
        versions={"torch": version("torch")},
    )


class _Draft:
    """A checkpoint while it is written: begun, written and published by all ranks together.

    Rank 0 holds the folder's lock meanwhile. The system releases it when the process dies, so whoever gets the lock next
    may remove the parts that it finds.
    """

    def __init__(self, root: str | os.PathLike[str], step: int) -> None:
        self.root, self.step = Path(root), step
        self.path = self.root / f"{folder.name(step)}{folder.PART}{uuid4().hex[:8]}"
        self.failed = f"step {step} was not saved in {self.root}"
        self._lock: FileLock | None = None
        gather(None)  # a rank that is still leaving the last save, or looks at what it left, must not see this one
        with together(self.failed, self.root):
            if rank_and_world_size()[0] == 0:
                self._begin()
        self.path = share(self.path)
        with self.writing():
            if not self.path.is_dir():
                rank = rank_and_world_size()[0]
                raise CheckpointError(
                    f"Rank {rank} does not see {self.path}: a checkpoint needs a folder that all ranks share."
                )

    def _begin(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.root / ".lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise CheckpointError(
                f"Another save into {self.root} is under way: wait for its .result(), or give each run its own folder."
            ) from None
        try:
            folder.sweep(self.root)
            self.path.mkdir()
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    @contextmanager
    def writing(self, group: dist.ProcessGroup | None = None) -> Iterator[Path]:
        """Around what every rank writes: if one rank fails, all raise the same CheckpointError and the part is removed."""
        try:
            with together(self.failed, self.root, group):
                yield self.path
        except CheckpointError:
            if self._lock is not None:
                shutil.rmtree(self.path, ignore_errors=True)
            self._release()
            gather(None, group)  # no rank goes on before the part is gone
            raise

    def publish(self, head: Manifest, keep: int, group: dist.ProcessGroup | None = None) -> Path:
        """Hash every file (the ranks share the work), flush, write the manifest and rename; remove old checkpoints."""
        rank, world_size = rank_and_world_size(group)
        with self.writing(group):
            names = files_in(self.path)
        names = share(names, group)
        hashed: dict[str, tuple[int, str]] = {}
        with self.writing(group):
            for name in names[rank::world_size]:
                path = self.path / name
                hashed[name] = (path.stat().st_size, digest(path, to_disk=True))
        files = {name: entry for part in gather(hashed, group) for name, entry in part.items()}
        final = self.root / folder.name(self.step)
        with self.writing(group):
            if rank == 0:
                self._write_manifest(replace(head, files=files))
                folder.publish(self.path, self.step)
        with together(f"step {self.step} was saved, but older ones could not be removed", self.root, group):
            try:
                if rank == 0:
                    folder.prune(self.root, self.step, keep)
            finally:
                self._release()
        return final

    def _write_manifest(self, head: Manifest) -> None:
        for path in sorted({(self.path / name).parent for name in head.files}):
            folder.fsync_folder(path)
        with (self.path / manifest.NAME).open("w", encoding="utf-8") as file:
            file.write(manifest.to_json(head))
            file.flush()
            os.fsync(file.fileno())
        folder.fsync_folder(self.path)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
