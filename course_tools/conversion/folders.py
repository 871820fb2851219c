"""What every conversion on disk does alike: read the configuration, write beside the place, rename when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from course_lib.checkpoints.errors import CheckpointError, reason
from course_lib.checkpoints.folder import fsync_folder
from course_tools.conversion.architecture import Architecture
from course_tools.conversion.manifest import NAME
from course_tools.conversion.tensor_files import INDEX

CONFIG = "config.json"
TRAVELS = {".json", ".txt", ".model", ".jinja", ".md"}  # tokenizer, generation settings, model card


def architecture_of(folder: Path) -> Architecture:
    """Of the model whose config.json stands there. Raises CheckpointError for one that is missing, damaged or not ours."""
    path = folder / CONFIG
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: no checkpoint is there.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: damaged ({error}).") from error
    if not isinstance(told, dict):
        raise CheckpointError(f"{path} is no table of settings: damaged.")
    with told_of(path):
        Architecture.of(told)
        from transformers import AutoConfig

        try:
            return Architecture.of(AutoConfig.for_model(**told))  # knows what a key that is not there means
        except Exception as error:  # whatever transformers' validation makes of it
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"transformers does not take it ({why}).") from error


def copy_others(source: Path, part: Path) -> None:
    """config.json, the tokenizer and what else is no weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in TRAVELS and path.name not in (INDEX, NAME):
            shutil.copyfile(path, part / path.name)


def write_text(path: Path, text: str) -> None:
    """A new file, and the disk has it."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def told_of(where: Path, why: str = "") -> Iterator[None]:
    """A ValueError about tensors becomes one about the checkpoint that holds them."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{where}{why}: {error}") from error


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A folder beside its place, renamed when all is written; an error, or Ctrl-C, leaves nothing of it."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already: give a folder that is empty or not there yet.")
    part = target.with_name(f".{target.name}.part-{uuid4().hex[:8]}")
    try:
        part.mkdir(parents=True)
        yield part
        for folder in [path for path in part.iterdir() if path.is_dir()] + [part]:
            fsync_folder(folder)
        os.replace(part, target)  # an empty folder may stand in its place
        fsync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {reason(error, target)}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
