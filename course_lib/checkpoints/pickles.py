"""Reading pickles that somebody may have changed: only names on a list are looked up, so no file can run code here.

A pickle is a small program; ``pickle.load`` does what it says, for instance ``os.system("...")``. Checksums do not help
where the manifest was rewritten as well. So DCP's ``.metadata`` goes through an unpickler that refuses every name that
is not below, and torch's files through torch's own weights-only one, with the few classes that DeepSpeed adds.
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from course_lib.checkpoints.errors import CheckpointError

# All that torch.distributed.checkpoint writes into .metadata; torch.float32 and the other dtypes besides.
METADATA_NAMES = {
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
# Plain data holders of DeepSpeed's, which its optimizer files carry beside the tensors.
DEEPSPEED_NAMES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in METADATA_NAMES.get(module, ())
        if not known and module == "torch" and re.fullmatch(r"[a-z]+\d[a-z0-9_]*|bool", name):
            known = isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise CheckpointError(f"it names {module}.{name}, which no checkpoint of ours does: tampered with.")
        return super().find_class(module, name)


def metadata(path: Path) -> Any:
    """DCP's ``.metadata`` file. Raises CheckpointError where it names anything but DCP's own classes, or is cut."""
    try:
        return _Metadata(io.BytesIO(path.read_bytes())).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} was not read: {error}") from None
    except Exception as error:  # a broken pickle raises whatever it likes
        raise CheckpointError(
            f"{path} is no metadata of a checkpoint: truncated or tampered with ({error})."
        ) from error


def torch_file(path: Path, names: Iterable[str] = ()) -> Any:
    """A file of ``torch.save``'s, its tensors mapped rather than read; ``names``: further classes that it may hold.

    Raises CheckpointError for a file that names anything else, and for one that is no torch file.
    """
    try:
        with torch.serialization.safe_globals([thing for name in names if (thing := _named(name))]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        unknown = sorted(set(_unknown_names(path)) - set(names))
        if unknown:
            raise CheckpointError(
                f"{path} was not read: it names {unknown[0]}, which no checkpoint of ours does: tampered with."
            ) from None
        raise CheckpointError(f"{path} is no file of a checkpoint: truncated or tampered with.") from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no file of a checkpoint: truncated or tampered with.") from error


def torch_bytes(value: io.BytesIO, what: str) -> Any:
    """The same for a piece of a DCP file; ``what`` names it."""
    try:
        return torch.load(value, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        said = re.search(r"GLOBAL (\S+)", str(error))
        names = f" names {said[1].rstrip('.')}, which no checkpoint of ours does" if said else " is no data of ours"
        raise CheckpointError(f"{what}{names}: tampered with.") from error


def _unknown_names(path: Path) -> list[str]:
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # told below as a broken file
        return []


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute, None)
