"""Whether a checkpoint is what its manifest says: first names and sizes, which costs nothing, then every byte."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from course_lib.checkpoints import manifest
from course_lib.checkpoints.errors import CheckpointError
from course_lib.checkpoints.manifest import Manifest


def files_in(checkpoint: Path) -> dict[str, int]:
    """Relative names and sizes in bytes of the files below a checkpoint, without its manifest.

    Raises CheckpointError for a link or another thing that is no plain file: it may lead anywhere.
    """
    found = {}
    for folder, folders, files in os.walk(checkpoint, followlinks=False):
        for name in [*folders, *files]:
            path = Path(folder, name)
            about = path.lstat()
            relative = path.relative_to(checkpoint).as_posix()
            if stat.S_ISREG(about.st_mode):
                found[relative] = about.st_size
            elif not stat.S_ISDIR(about.st_mode):
                raise CheckpointError(f"{path} is a link or no plain file: the checkpoint was tampered with.")
    found.pop(manifest.NAME, None)
    return found


def whole(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint that has every file, each of its size, and no other. Reads no file but the manifest.

    Raises CheckpointError: none there, unfinished, a newer format, truncated, a file too many.
    """
    told = manifest.read(checkpoint)
    found = files_in(checkpoint)
    for name, (size, _) in told.files.items():
        if name not in found:
            raise CheckpointError(f"{checkpoint} lacks its file {name}: it was truncated or tampered with.")
        if found[name] != size:
            raise CheckpointError(
                f"{checkpoint / name} has {found[name]:,} bytes instead of {size:,}: it was truncated or tampered with."
            )
    strangers = sorted(set(found) - set(told.files))
    if strangers:
        raise CheckpointError(f"{checkpoint} has a file {strangers[0]} that its manifest does not name: tampered with.")
    return told


def check_bytes(checkpoint: Path, told: Manifest, names: Iterable[str]) -> None:
    """Read the named files through. Raises CheckpointError for one that has other bytes than when it was saved."""
    for name in names:
        if digest(checkpoint / name) != told.files[name][1]:
            raise CheckpointError(f"{checkpoint / name} has other bytes than when it was saved: tampered with.")


def digest(path: Path, *, to_disk: bool = False) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits; ``to_disk`` waits until the disk has it."""
    with path.open("rb") as file:
        if to_disk:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(checkpoint: str | os.PathLike[str]) -> Manifest:
    """The manifest of a checkpoint whose every byte is as it was saved; no ranks needed, nothing is unpickled.

    Raises CheckpointError, with one sentence, for any other.
    """
    path = Path(checkpoint)
    told = whole(path)
    check_bytes(path, told, told.files)
    return told
