"""A checkpoint while it is written: by all ranks into one part, sealed by rank 0, renamed, or gone without a trace."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist
from filelock import FileLock, Timeout

from course_lib.checkpoints import folder, manifest, wholeness
from course_lib.checkpoints.errors import CheckpointError
from course_lib.checkpoints.manifest import Manifest
from course_lib.checkpoints.together import gather, place, share, together


class Draft:
    """Begun, written and published by all ranks together.

    Rank 0 holds the folder's lock meanwhile. The system takes the lock back when the process dies, so a part that is
    seen by the next holder is nobody's any more.
    """

    def __init__(self, root: str | os.PathLike[str], step: int) -> None:
        self.root, self.step = Path(root), step
        self.path = self.root / f"{folder.name(step)}{folder.PART}{uuid4().hex[:8]}"
        self.failed = f"step {step} was not saved in {self.root}"
        self._lock: FileLock | None = None
        gather(None)  # a rank that is still leaving the last save, or looks at what it left, must not see this one
        with together(self.failed, self.root):
            if place()[0] == 0:
                self._begin()
        self.path = share(self.path)
        with self.writing():
            if not self.path.is_dir():
                raise CheckpointError(
                    f"Rank {place()[0]} does not see {self.path}: a checkpoint needs a folder that all ranks share."
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
        """Around what every rank writes: one rank fails, all raise the same CheckpointError, and the part is removed."""
        try:
            with together(self.failed, self.root, group):
                yield self.path
        except CheckpointError:
            self.discard()
            gather(None, group)  # no rank goes on before the part is gone
            raise

    def publish(self, head: Manifest, keep: int, group: dist.ProcessGroup | None = None) -> Path:
        """Hash every file (the ranks share the work), wait for the disk, write the manifest, rename; remove old ones."""
        rank, world_size = place(group)
        with self.writing(group):
            names = sorted(wholeness.files_in(self.path))
        names = share(names, group)
        mine: dict[str, tuple[int, str]] = {}
        with self.writing(group):
            for name in names[rank::world_size]:
                path = self.path / name
                mine[name] = (path.stat().st_size, wholeness.digest(path, to_disk=True))
        files = {name: entry for part in gather(mine, group) for name, entry in part.items()}
        final = self.root / folder.name(self.step)
        with self.writing(group):
            if rank == 0:
                self._seal(replace(head, files=files))
                final = folder.publish(self.path, self.step)
        with together(f"step {self.step} was saved, but older ones could not be removed", self.root, group):
            try:
                if rank == 0:
                    folder.prune(self.root, self.step, keep)
            finally:
                self.release()
        return final

    def _seal(self, told: Manifest) -> None:
        for path in sorted({(self.path / name).parent for name in told.files} | {self.path}):
            folder.fsync_folder(path)
        with (self.path / manifest.NAME).open("w", encoding="utf-8") as file:
            file.write(manifest.to_json(told))
            file.flush()
            os.fsync(file.fileno())
        folder.fsync_folder(self.path)

    def discard(self) -> None:
        """Remove the part; the older checkpoints were never touched."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
