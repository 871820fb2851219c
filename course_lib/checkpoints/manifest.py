"""manifest.json: what a checkpoint is, and what each of its files must be. Written last, so a checkpoint that has one
is whole; read as somebody else's input, so every field is looked at before it is used."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from course_lib.checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FORMAT = 1
NAME = "manifest.json"
KINDS = ("fsdp", "zero")
# What wraps a module in a name, and is no part of the model.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: optimizer steps done when it was saved.
        kind: ``"fsdp"`` (torch.distributed.checkpoint, also of an unsharded model) or ``"zero"`` (DeepSpeed).
        world_size: ranks that saved it.
        model: per parameter its dtype and whole shape, before any sharding.
        files: per file its size in bytes and SHA-256.
        extra: the caller's own JSON.
        optimizer: class of the optimizer whose state it holds, ``""`` for none.
        trainable_only: frozen parameters were left out.
        zero_stage: of the DeepSpeed engine, 0 to 3; None for ``"fsdp"``.
        versions: of the libraries that wrote it.
    """

    step: int
    kind: str
    world_size: int
    model: dict[str, tuple[str, tuple[int, ...]]]
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: str = ""
    trainable_only: bool = False
    zero_stage: int | None = None
    versions: dict[str, str] = field(default_factory=dict)


def to_json(manifest: Manifest) -> str:
    """The manifest as text, with a checksum of itself: a slip of the disk in it is noticed too."""
    told = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({**told, "checksum": _checksum(told)}, indent=1) + "\n"


def _checksum(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def read(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError: none there, not JSON, a newer format, a field amiss."""
    try:
        text = (checkpoint / NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} has no {NAME}: no finished checkpoint is there.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{checkpoint / NAME} cannot be read: {error}.") from error
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{checkpoint / NAME} is no JSON: it was truncated or tampered with.") from None
    version = told.get("format") if isinstance(told, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{checkpoint / NAME} does not say which format it has: it is no manifest of ours.")
    if version > FORMAT:
        raise CheckpointError(
            f"{checkpoint} was saved in format {version}, and this version of the course reads up to {FORMAT}: "
            "load it with the newer version."
        )
    checksum = told.pop("checksum", None)
    if checksum != _checksum(told):
        raise CheckpointError(f"{checkpoint / NAME} does not agree with its own checksum: it was tampered with.")
    wrong = _what_is_wrong(told)
    if wrong:
        raise CheckpointError(f"{checkpoint / NAME}: {wrong}: it was tampered with.")
    del told["format"]
    told["model"] = {name: (dtype, tuple(shape)) for name, (dtype, shape) in told["model"].items()}
    told["files"] = {name: (size, digest) for name, (size, digest) in told["files"].items()}
    return Manifest(**told)


def _what_is_wrong(told: dict[str, Any]) -> str | None:
    fields = set(Manifest.__dataclass_fields__) | {"format"}
    if set(told) != fields:
        return f"fields {sorted(set(told) ^ fields)} are missing or unknown"
    for name in ("step", "world_size"):
        if type(told[name]) is not int or told[name] < (name == "world_size"):
            return f"{name}={told[name]!r} is no number of {'ranks' if name == 'world_size' else 'steps'}"
    if told["kind"] not in KINDS:
        return f"kind={told['kind']!r} is not one of {KINDS}"
    if told["zero_stage"] not in ((0, 1, 2, 3) if told["kind"] == "zero" else (None,)):
        return f"zero_stage={told['zero_stage']!r} does not go with kind={told['kind']!r}"
    if not isinstance(told["optimizer"], str) or not isinstance(told["trainable_only"], bool):
        return "optimizer is no name, or trainable_only neither true nor false"
    for name in ("model", "files", "extra", "versions"):
        if not isinstance(told[name], dict):
            return f"{name} is no table"
    for name, entry in told["model"].items():
        if not (_pair(entry, str, list) and all(type(size) is int and size >= 0 for size in entry[1])):
            return f"parameter {name!r} has no dtype and shape"
    for name, entry in told["files"].items():
        if not stays_inside(name):
            return f"the file name {name!r} leads out of the checkpoint"
        if not (_pair(entry, int, str) and entry[0] >= 0 and len(entry[1]) == 64):
            return f"file {name!r} has no size and SHA-256"
    return None


def _pair(entry: Any, first: type, second: type) -> bool:
    return isinstance(entry, list) and [type(part) for part in entry] == [first, second]


def stays_inside(name: str) -> bool:
    """Whether a relative file name stays below the folder that it is joined to."""
    path = PurePosixPath(name)
    plain = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name
    return plain and "\\" not in name and "\0" not in name and ":" not in name


def fingerprint(model: torch.nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each parameter's dtype and whole shape, whoever wraps the model and however it is sharded."""
    found = {}
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        shape = getattr(parameter, "ds_shape", parameter.shape)  # DeepSpeed's stage 3 leaves an empty tensor
        found[name.removeprefix("module.")] = (str(parameter.dtype).removeprefix("torch."), tuple(shape))
    return found


def difference(saved: dict[str, Any], here: dict[str, Any]) -> str | None:
    """In what the saved model is another one than this; None where they are the same."""
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
