"""Files of tensors: read by mapping them into memory and written one tensor at a time, so that a 70B model needs little.

``safetensors.torch.save_file`` and ``torch.save`` want all tensors of a file at once. So each file is laid out first, and
its tensors are put into their places as they come.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from course_lib.checkpoints.errors import CheckpointError, reason

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The dtypes that weights are trained in, in the order in which safetensors lays them out.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Unread:
    """Stands in for whatever else Megatron pickles beside the weights: nothing of it is imported or run."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load(path: Path) -> dict[str, torch.Tensor]:
    """Map a safetensors file into memory. Raises CheckpointError: missing, damaged, no floating-point weights."""
    try:
        return _weights(path, load_file(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: truncated or damaged ({error}).") from error


def load_megatron(path: Path) -> tuple[dict[str, torch.Tensor], Namespace]:
    """Map the model of a model_optim_rng.pt into memory. Returns it and Megatron's arguments. Raises as ``load``."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins = [(Namespace if name == "argparse.Namespace" else Unread, name) for name in unknown]
        with torch.serialization.safe_globals(stand_ins):
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except Exception as error:  # whatever torch makes of damaged bytes
        raise CheckpointError(f"{path} cannot be read: truncated or damaged ({reason(error)[:200]}).") from error
    model, args = (checkpoint.get(key) if isinstance(checkpoint, dict) else None for key in ("model", "args"))
    if not isinstance(model, dict) or not isinstance(args, Namespace):
        raise CheckpointError(f"{path} holds no 'model' and 'args' as Megatron saves them without virtual stages.")
    tensors = {name: tensor for name, tensor in model.items() if not name.endswith("_extra_state")}  # of FP8: scales
    return _weights(path, tensors), args


def _weights(path: Path, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    for name, tensor in tensors.items():
        if getattr(tensor, "dtype", None) not in DTYPES:
            raise CheckpointError(
                f"{path} holds {name} as {getattr(tensor, 'dtype', type(tensor).__name__)}: "
                f"only {', '.join(map(str, DTYPES))} are converted."
            )
    return tensors


def load_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a Hugging Face checkpoint into memory. Raises CheckpointError if something is missing."""
    if (folder / SINGLE).exists():
        return load(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise CheckpointError(
            f"{folder} has neither {SINGLE} nor {INDEX}: save the model with save_pretrained, which writes safetensors."
        )
    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        outside = [file for file in places.values() if Path(file).name != file]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{folder / INDEX} is no index of tensors: it is damaged.") from None
    if outside:
        raise CheckpointError(f"{folder / INDEX} names {outside[0]}, a file outside of its folder.")
    tables = {file: load(folder / file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in tables[file]:
            raise CheckpointError(f"{folder / file} lacks {name}, which {INDEX} says is there.")
    return {name: tables[file][name] for name, file in places.items()}


def write(path: Path, wanted: Mapping[str, torch.Tensor], get: Callable[[str], torch.Tensor]) -> None:
    """Write a safetensors file, the same as ``save_pretrained`` writes, and wait for the disk.

    Args:
        path: the new file.
        wanted: a tensor on the meta device for every one of the file.
        get: returns a tensor by its name; it is asked once for each, in the file's order.
    """
    dtypes = list(DTYPES)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(wanted, key=lambda name: (dtypes.index(wanted[name].dtype), name)):
        start, end = end, end + wanted[name].nbytes
        dtype, shape = DTYPES[wanted[name].dtype], list(wanted[name].shape)
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    del table["__metadata__"]
    _fill(path, {name: 8 + len(head) + entry["data_offsets"][0] for name, entry in table.items()}, get)


def write_megatron(
    path: Path, wanted: Mapping[str, torch.Tensor], get: Callable[[str], torch.Tensor], args: Namespace
) -> None:
    """Write a model_optim_rng.pt as Megatron's ``save_checkpoint`` does, without an optimizer, and wait for the disk."""
    from torch._subclasses import FakeTensorMode

    # memory that nobody touches, for skip_data leaves the bytes out
    model = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in wanted.items()}
    with torch.serialization.skip_data():
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": model}, path)
    with FakeTensorMode(), torch.serialization.safe_globals([Namespace]):
        laid_out = torch.load(path, weights_only=True)["model"]
    offsets = {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in laid_out.items()}
    _fill(path, offsets, get)


def _fill(path: Path, offsets: Mapping[str, int], get: Callable[[str], torch.Tensor]) -> None:
    """Put each tensor where the file has room for it."""
    with path.open("r+b") as file:
        for name, offset in offsets.items():
            file.seek(offset)
            file.write(get(name).contiguous().reshape(-1).view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())
