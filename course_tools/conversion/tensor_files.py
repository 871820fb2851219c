"""safetensors files, read by slices and written one tensor at a time, so that a 70B model needs little memory.

``safetensors.torch.save_file`` wants all tensors of a file at once. The format is simple enough to write as it comes: the
length of a JSON table in 8 bytes, the table (dtype, shape and place of each tensor), and the tensors' bytes in that order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from course_lib.checkpoints.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # an element, of the dtypes that weights are trained in
TensorInfo = tuple[str, tuple[int, ...]]  # a tensor's dtype, as safetensors names it, and its shape


def num_bytes(info: TensorInfo) -> int:
    return BYTES[info[0]] * math.prod(info[1])


class Reader:
    """Opens safetensors files once each, and gives their tensors to be sliced; no tensor is read before that."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._tables: dict[Path, dict[str, TensorInfo]] = {}
        self._exit = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._exit.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing.") from None
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(
                    f"{path} is no whole safetensors file: truncated or damaged ({error})."
                ) from error
        return self._open[path]

    def table(self, path: Path) -> dict[str, TensorInfo]:
        """Return dtype and shape of each tensor of a file. Raises CheckpointError: missing, damaged, no floating-point weights."""
        if path in self._tables:
            return self._tables[path]
        file, found = self._file(path), {}
        for name in file.keys():
            piece = file.get_slice(name)
            found[name] = (piece.get_dtype(), tuple(piece.get_shape()))
            if found[name][0] not in BYTES:
                raise CheckpointError(
                    f"{path} holds {name} as {found[name][0]}: only {', '.join(BYTES)} are converted."
                )
        self._tables[path] = found
        return found

    def slices(self, path: Path, name: str) -> Any:
        return self._file(path).get_slice(name)


def weight_files(folder: Path, reader: Reader) -> dict[str, Path]:
    """Return the file of each tensor of a Hugging Face checkpoint. Raises CheckpointError if something is missing."""
    if (folder / SINGLE).exists():
        return dict.fromkeys(reader.table(folder / SINGLE), folder / SINGLE)
    if not (folder / INDEX).exists():
        raise CheckpointError(
            f"{folder} has neither {SINGLE} nor {INDEX}: save the model with save_pretrained, which writes safetensors."
        )
    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {name: folder / file for name, file in places.items() if Path(file).name == file}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{folder / INDEX} is no index of tensors: it is damaged.") from None
    if len(files) < len(places):
        raise CheckpointError(f"{folder / INDEX} names a file outside of its folder.")
    for path in set(files.values()):
        reader.table(path)
    for name, path in files.items():
        if name not in reader.table(path):
            raise CheckpointError(f"{path} lacks {name}, which {INDEX} says is there.")
    return files


def write(path: Path, wanted: Mapping[str, TensorInfo], tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, str]:
    """Write a file of the tensors in ``wanted``, which come in that order, and wait for the disk.

    Returns its size in bytes and its SHA-256.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in wanted.items():
        start, end = end, end + num_bytes(info)
        table[name] = {"dtype": info[0], "shape": list(info[1]), "data_offsets": [start, end]}
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest, written = hashlib.sha256(), 0
    names = iter(wanted)
    with path.open("xb") as file:

        def put(data: Any) -> None:
            file.write(data)
            digest.update(data)

        put(len(head).to_bytes(8, "little"))
        put(head)
        for name, tensor in tensors:
            assert name == next(names) and tuple(tensor.shape) == wanted[name][1], name
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            put(data)
            written += data.nbytes
        assert written == end and next(names, None) is None, path
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(head) + end, digest.hexdigest()
