"""manifest.json: what a checkpoint holds, with the size and SHA-256 of each file. It is written last, so a checkpoint
that has one is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FORMAT = 2
NAME = "manifest.json"
# What wraps a module in a name, and is no part of the model.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done when it was saved.
        world_size: ranks that saved it.
        model: per parameter its dtype and whole shape, before any sharding.
        files: per file its size in bytes and SHA-256.
        extra: the caller's own JSON.
        optimizer: class of the optimizer whose state it holds, ``""`` for none.
        trainable_only: frozen parameters were left out.
        versions: of the libraries that wrote it.
    """

    step: int
    world_size: int
    model: dict[str, tuple[str, tuple[int, ...]]]
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: str = ""
    trainable_only: bool = False
    versions: dict[str, str] = field(default_factory=dict)


def to_json(manifest: Manifest) -> str:
    """The manifest as text, with a checksum of itself."""
    fields = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=1) + "\n"


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError: no manifest, another format, truncated or changed."""
    try:
        fields = json.loads((checkpoint / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} has no {NAME}: no finished checkpoint is there.") from None
    except OSError as error:
        raise CheckpointError(f"{checkpoint / NAME} cannot be read: {error}.") from error
    except (ValueError, RecursionError):
        raise CheckpointError(f"{checkpoint / NAME} is no JSON: it was truncated or changed.") from None
    version = fields.pop("format", None) if isinstance(fields, dict) else None
    if not isinstance(version, int):
        raise CheckpointError(f"{checkpoint / NAME} does not say which format it has: it is no manifest of ours.")
    if version != FORMAT:
        raise CheckpointError(
            f"{checkpoint} was saved in format {version}, and this version of the course reads format {FORMAT}: "
            "load it with the version that saved it."
        )
    checksum = fields.pop("checksum", None)
    if checksum != _checksum({"format": version, **fields}):
        raise CheckpointError(f"{checkpoint / NAME} does not agree with its own checksum: it was changed.")
    fields["model"] = {name: (dtype, tuple(shape)) for name, (dtype, shape) in fields["model"].items()}
    fields["files"] = {name: tuple(entry) for name, entry in fields["files"].items()}
    return Manifest(**fields)


def files_in(checkpoint: Path) -> list[str]:
    """Relative names of the files below a checkpoint, sorted, without its manifest."""
    names = (p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file())
    return sorted(name for name in names if name != NAME)


def check_sizes(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint that has all its files, each of the right size; reads no other file.

    Raises CheckpointError for any other.
    """
    manifest = read(checkpoint)
    for name, (size, _) in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} lacks its file {name}: it was truncated or changed.")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes instead of {size:,}: it was truncated or changed."
            )
    return manifest


def check_bytes(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CheckpointError if one of the named files has another checksum than when it was saved."""
    for name in names:
        if digest(checkpoint / name) != manifest.files[name][1]:
            raise CheckpointError(f"{checkpoint / name} has other bytes than when it was saved.")


def digest(path: Path, *, to_disk: bool = False) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits; ``to_disk`` flushes it to the disk first."""
    with path.open("rb") as file:
        if to_disk:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(checkpoint: str | os.PathLike[str]) -> Manifest:
    """Check every byte of a checkpoint and return its manifest; needs no ranks and loads nothing.

    Raises:
        CheckpointError: anything is missing or differs from what was saved.
    """
    path = Path(checkpoint)
    manifest = check_sizes(path)
    check_bytes(path, manifest, manifest.files)
    return manifest


def fingerprint(model: torch.nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each parameter's dtype and whole shape, however the model is wrapped and sharded."""
    found = {}
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        found[name.removeprefix("module.")] = (str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
    return found


def difference(saved: dict[str, Any], here: dict[str, Any]) -> str | None:
    """The first difference between two fingerprints as half a sentence; None if there is none."""
    for name, (dtype, shape) in saved.items():
        if name not in here:
            return f"it has a parameter {name!r}, and this model has not"
        if shape != here[name][1]:
            return f"its {name!r} has shape {list(shape)}, and this model's {list(here[name][1])}"
        if dtype != here[name][0]:
            return f"its {name!r} is {dtype}, and this model's {here[name][0]}: build the model in the same precision"
    for name in here:
        if name not in saved:
            return f"this model has a parameter {name!r}, and it has not"
    return None
