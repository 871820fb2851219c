"""A folder of checkpoints: ``step-00000010`` and so on, each complete or not there.

A checkpoint is written beside its place, as ``step-00000010.part-3f2a91bc``, and renamed when it is complete: a rename is
all or nothing, whenever the process is killed. What a killed save leaves behind, the next one removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course_lib.checkpoints.errors import CheckpointError
from course_lib.files import write_atomically

MANIFEST = "manifest"
_CHECKPOINT = re.compile(r"step-(\d{8,})(\.replaced)?")
_LEFT_BEHIND = re.compile(r"step-\d{8,}\.(part-.*|replaced)")


# The manifest: what a checkpoint holds. It is written last.


@dataclass(frozen=True)
class Manifest:
    step: int  # updates of the optimizer
    world_size: int  # ranks that saved it
    model: dict[str, str]  # "float32 [256, 64]" for each tensor's name: its shape before any sharding
    files: dict[str, list[Any]]  # by name: [size in bytes, SHA-256]
    extra: dict[str, Any]  # the caller's own


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest as its own SHA-256 and then JSON, and wait until the disk has the whole checkpoint."""
    body = json.dumps(asdict(manifest), indent=1)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    write_atomically(checkpoint / MANIFEST, f"{checksum}\n{body}", durable=True)
    fsync_folder(checkpoint)


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint; raise CheckpointError unless all its files are there, each of the right size."""
    try:
        checksum, _, body = (checkpoint / MANIFEST).read_bytes().partition(b"\n")
    except FileNotFoundError as error:  # what cannot be read just now is no reason to remove it
        raise CheckpointError(f"{checkpoint} has no manifest: no finished checkpoint is there.") from error
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise CheckpointError(f"{checkpoint / MANIFEST} was truncated or changed.")
    manifest = Manifest(**json.loads(body))
    for name, (size, _) in manifest.files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"{path} does not have its {size:,} bytes: it was truncated, changed or removed.")
    return manifest


def digest(path: Path) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's names."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The folder: which checkpoints are there, how one gets its name, and which go.


def name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints by step, newest first; damaged ones are among them.

    ``step-00000010.replaced`` counts where step 10 itself is missing: a save was killed while it replaced it.
    """
    found = {}
    for path in sorted(folder.glob("step-*"), reverse=True):
        if match := _CHECKPOINT.fullmatch(path.name):
            found[int(match[1])] = path  # step-00000010 comes after step-00000010.replaced, and takes its place
    return dict(sorted(found.items(), reverse=True))


def problem(checkpoint: Path) -> str:
    """Say what is wrong with a checkpoint, "" if nothing is; sizes are compared, not every byte."""
    try:
        read_manifest(checkpoint)
    except CheckpointError as error:
        return str(error)
    return ""


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a folder, or None, and print why a newer one is skipped.

    Sizes are compared here, and every byte by ``load``.
    """
    for path in checkpoints_in(Path(folder)).values():
        why = problem(path)
        if not why:
            return path
        print(f"checkpoint skipped: {why}")
    return None


def sweep(folder: Path) -> None:
    """Remove what killed saves left behind. Only for the process that holds the folder's lock."""
    checkpoints = checkpoints_in(folder).values()
    for path in folder.iterdir():
        if _LEFT_BEHIND.fullmatch(path.name) and path not in checkpoints:
            shutil.rmtree(path, ignore_errors=True)  # an orphan may still be writing there: the next save tries again


def publish(part: Path, step: int) -> None:
    """Give a finished part its name. At every instant the folder has the old checkpoint of this step or the new one."""
    final = part.with_name(name(step))
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        os.replace(final, replaced)
    os.replace(part, final)
    fsync_folder(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove checkpoints older than the newest ``keep`` complete ones; those of steps after ``step`` are left alone."""
    complete = 0
    for path in [path for number, path in checkpoints_in(folder).items() if number <= step]:
        if complete >= max(keep, 1):  # never the newest
            shutil.rmtree(path)  # a file of it goes first, so no half of it is ever taken for complete
        complete += not problem(path)
