"""``merge``: shards put together as a Hugging Face checkpoint, after every byte of them has been looked at."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from course_lib.checkpoints.errors import CheckpointError
from course_lib.checkpoints.manifest import digest
from course_tools.conversion import manifest
from course_tools.conversion.folders import CONFIG, appearing, architecture_of, copy_others, told_of, write_text
from course_tools.conversion.manifest import Manifest
from course_tools.conversion.pieces import Piece
from course_tools.conversion.tensor_files import INDEX, SINGLE, About, Reader, num_bytes, write
from course_tools.conversion.tensors import fitting, once, whole

FILE_BYTES = 50_000_000_000  # the largest file that a hub takes


def merge(folder: str | os.PathLike[str], out: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES) -> Path:
    """Put the shards in ``folder`` together as a checkpoint for ``from_pretrained(out)``; one tensor at a time is in memory.

    Every file is held against the manifest, byte for byte, before anything is written, and ``out`` appears when it is whole.
    More than ``file_bytes`` of weights become several files and an index.

    Raises:
        FileExistsError: ``out`` is there already, and not empty.
        CheckpointError: a shard is missing, damaged or of another shape; the manifest does not fit; copies of one tensor
            differ; the disk is full. The sentence says which.
    """
    source = Path(folder)
    told = manifest.read(source)
    architecture = architecture_of(source)
    with told_of(source / manifest.NAME, f" (it does not fit {CONFIG})"):
        stages = fitting(architecture, told.tp, told.pp, told.layout, told.shapes())
    with Reader() as reader, appearing(Path(out)) as part:
        _check_files(source, told, reader)

        def get(rank: int, stage: int, name: str) -> torch.Tensor:
            return reader.slices(source / told.file(rank, stage), name)[:]

        with told_of(source):
            kept = once(stages, told.tp, get)
        parts = _several(kept, told, file_bytes)
        places: dict[str, str] = {}
        for number, some in enumerate(parts, 1):
            name = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            wanted = dict(pair for stage, piece in some for pair in _sources(stage, piece, told))
            tensors = (
                pair
                for stage, piece in some
                for pair in whole(piece, told.tp, lambda rank, shard, stage=stage: get(rank, stage, shard))
            )
            with told_of(source):
                write(part / name, wanted, tensors)
            places |= dict.fromkeys(wanted, name)
        if len(parts) > 1:
            size = sum(num_bytes(about) for some in parts for s, p in some for _, about in _sources(s, p, told))
            index = {"metadata": {"total_size": size}, "weight_map": places}
            write_text(part / INDEX, json.dumps(index, indent=2) + "\n")
        copy_others(source, part)
    return Path(out)


def _check_files(folder: Path, told: Manifest, reader: Reader) -> None:
    """Cheap looks at every shard first, then every byte."""
    for place, shard in told.shards.items():
        path = folder / told.file(*place)
        if not path.is_file():
            raise CheckpointError(f"{path}, the shard of tp rank {place[0]} and stage {place[1]}, is missing.")
        found = reader.table(path)
        for name in sorted(set(found) ^ set(shard.tensors)):
            raise CheckpointError(
                f"{path} {'has' if name in found else 'lacks'} {name}, unlike what {manifest.NAME} says."
            )
        for name, about in found.items():
            if about != shard.tensors[name]:
                was, should = (f"{dtype} {list(shape)}" for dtype, shape in (about, shard.tensors[name]))
                raise CheckpointError(f"{path} has {name} as {was}, and {manifest.NAME} says {should}.")
    for place, shard in told.shards.items():
        path = folder / told.file(*place)
        if path.stat().st_size != shard.bytes or digest(path) != shard.sha256:
            raise CheckpointError(
                f"{path} has other bytes than {manifest.NAME} says: damaged; or, if it was trained since, seal the folder anew."
            )


def _sources(stage: int, piece: Piece, told: Manifest) -> Iterator[tuple[str, About]]:
    dtype = told.shards[0, stage].tensors[piece.name][0]
    for name, shape in zip(piece.sources, piece.shapes, strict=True):
        yield name, (dtype, (piece.rows or shape[0], *shape[1:]))


def _several(kept: list[tuple[int, Piece]], told: Manifest, file_bytes: int) -> list[list[tuple[int, Piece]]]:
    """The pieces of each file of weights: as many as fit."""
    files: list[list[tuple[int, Piece]]] = [[]]
    held = 0
    for stage, piece in kept:
        size = sum(num_bytes(about) for _, about in _sources(stage, piece, told))
        if files[-1] and held + size > file_bytes:
            files.append([])
            held = 0
        files[-1].append((stage, piece))
        held += size
    return files
