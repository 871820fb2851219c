"""A folder of checkpoints: ``step-00000010`` and so on, each complete or not there.

A checkpoint is written beside its place, as ``step-00000010.part-3f2a91bc``, and renamed when it is complete: a rename is
all or nothing, whenever the process is killed. A rank that dies leaves a part behind; the next save removes it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from course_lib.checkpoints.errors import CheckpointError, rank_and_world_size
from course_lib.checkpoints.manifest import NAME, check_sizes

PART = ".part-"
REPLACED = ".replaced"
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")


@dataclass(frozen=True)
class Found:
    """One entry of a folder of checkpoints: its path, its step, and what is wrong with it, ``""`` if nothing is."""

    path: Path
    step: int
    problem: str


def name(step: int) -> str:
    return f"step-{step:08d}"


def survey(folder: str | os.PathLike[str]) -> list[Found]:
    """Every checkpoint of a folder, newest first, complete or not; sizes are checked, not every byte."""
    found = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        plain, _, unfinished = path.name.partition(PART)
        match = _NAME.fullmatch(plain)
        if not match or (match[2] and path.with_name(name(int(match[1]))).exists()):
            continue
        problem = f"{path} was never finished." if unfinished else ""
        if not unfinished:
            try:
                check_sizes(path)
            except CheckpointError as error:
                problem = str(error)
        found.append(Found(path, int(match[1]), problem))
    return sorted(found, key=lambda one: (one.step, not one.problem, one.path.name), reverse=True)


def latest(folder: str | os.PathLike[str], *, tell: Callable[[str], None] | None = None) -> Path | None:
    """The newest complete checkpoint of a folder, or None; sizes are checked here, and every byte by ``load``.

    ``tell`` takes a sentence for each newer one that was skipped; None prints it, on rank 0 only.
    """
    tell = tell or (print if rank_and_world_size()[0] == 0 else lambda _: None)
    for one in survey(folder):
        if not one.problem:
            return one.path
        tell(f"checkpoint skipped: {one.problem}")
    return None


def find(where: str | os.PathLike[str]) -> Path:
    """The checkpoint itself, or a folder's newest complete one. Raises CheckpointError if there is none."""
    path = Path(where)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: no checkpoint is there.")
    if (path / NAME).exists() or _NAME.fullmatch(path.name.partition(PART)[0]):
        check_sizes(path)
        return path
    skipped: list[str] = []
    found = latest(path, tell=skipped.append)
    if found is None:
        problems = " ".join(line.removeprefix("checkpoint skipped: ") for line in skipped)
        raise CheckpointError(f"{path} has no whole checkpoint{': ' + problems if problems else '.'}")
    for line in skipped:
        print(line)
    return found


def older_one(checkpoint: Path) -> str:
    """A sentence on what may be loaded instead of a damaged checkpoint."""
    others = [one for one in survey(checkpoint.parent) if not one.problem and one.path != checkpoint]
    return f" {others[0].path} is whole." if others else ""


def sweep(folder: Path) -> None:
    """Remove what killed saves left behind, and put back a checkpoint that was about to be replaced.

    Only for the process that holds the folder's lock.
    """
    for path in list(folder.iterdir()):
        plain, _, unfinished = path.name.partition(PART)
        match = _NAME.fullmatch(plain)
        if not match:
            continue
        if unfinished:
            shutil.rmtree(path, ignore_errors=True)  # an orphan may still be writing: the next save tries again
        elif match[2]:
            final = path.with_name(name(int(match[1])))
            _remove(path) if final.exists() else os.replace(path, final)


def publish(part: Path, step: int) -> Path:
    """Give a finished part its name. At every instant the folder has the old checkpoint of this step or the new one."""
    final = part.with_name(name(step))
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        os.replace(final, replaced)
    os.replace(part, final)
    fsync_folder(final.parent)
    if replaced.exists():
        _remove(replaced)
    return final


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove checkpoints of earlier steps beyond the newest ``keep`` complete ones; later steps are left alone."""
    earlier = [one for one in survey(folder) if one.step <= step and PART not in one.path.name]
    kept = [one for one in earlier if not one.problem][:keep]
    for one in earlier:
        if kept and one not in kept and one.step < kept[-1].step:
            _remove(one.path)


def _remove(path: Path) -> None:
    """Rename, then remove: removing takes time, and a checkpoint is never half there."""
    part = path.with_name(f"{path.name}{PART}{uuid4().hex[:8]}")
    os.replace(path, part)
    shutil.rmtree(part)


def fsync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's names."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
