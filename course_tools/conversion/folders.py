"""Checkpoints on disk: `split` a Hugging Face one into shards, `merge` shards into one, `seal` shards that training wrote.

One tensor at a time is in memory. What is written appears under its name when it is complete, by one rename.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import torch

from course_lib.checkpoints.errors import CheckpointError, reason
from course_lib.checkpoints.folder import digest, fsync_folder
from course_lib.files import write_atomically
from course_tools.conversion import manifest as manifests
from course_tools.conversion.architecture import Architecture
from course_tools.conversion.manifest import Manifest, Shard
from course_tools.conversion.pieces import Piece, ends, pieces
from course_tools.conversion.tensor_files import INDEX, SINGLE, Reader, TensorInfo, num_bytes, weight_files, write
from course_tools.conversion.tensors import check_whole, cut, fitting, once, padding, same, whole

CONFIG = "config.json"
COPIED = {".json", ".txt", ".model", ".jinja", ".md"}  # tokenizer, generation settings, model card
FILE_BYTES = 50_000_000_000  # the largest file that the Hugging Face Hub takes


def split(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tp: int,
    pp: int,
    layout: str = "hugging_face",
    pad_vocab: bool = False,
) -> Path:
    """Split the Hugging Face checkpoint in ``folder`` into ``tp`` times ``pp`` shards.

    ``out`` gets one safetensors file per shard ("megatron": mp_rank_TT_PPP/model.safetensors), config.json and the
    tokenizer's files, and manifest.json. ``layout`` and ``pad_vocab`` are those of ``split_state``.

    Raises:
        ValueError: a grid that does not divide the model, or a model other than Llama, Qwen2 and Qwen3.
        FileExistsError: ``out`` exists already, and is not empty.
        CheckpointError: the checkpoint lacks something, or is damaged; the disk is full.
    """
    source = Path(folder)
    architecture = read_architecture(source)
    stages = pieces(architecture, tp=tp, pp=pp, layout=layout, vocab_rows=padding(architecture, tp, layout, pad_vocab))
    with Reader() as reader, new_folder(Path(out)) as part:
        files = weight_files(source, reader)
        info = {name: reader.table(path)[name] for name, path in files.items()}
        with checkpoint_errors(source):
            check_whole(architecture, {name: shape for name, (_, shape) in info.items()}, "its checkpoint")
            _check_tied(architecture, files, reader)
        shards: dict[tuple[int, int], Shard] = {}
        for rank, stage in ((rank, stage) for stage in range(pp) for rank in range(tp)):
            path = part / manifests.shard_name(layout, tp, pp, rank, stage)
            path.parent.mkdir(exist_ok=True)
            table = {piece.name: (info[piece.sources[0]][0], piece.shape(tp)) for piece in stages[stage]}
            tensors = (
                (piece.name, cut(piece, tp, rank, [reader.slices(files[name], name) for name in piece.sources]))
                for piece in stages[stage]
            )
            with checkpoint_errors(source):
                shards[rank, stage] = Shard(*write(path, table, tensors))
        _copy_other_files(source, part)
        text = manifests.to_json(Manifest(layout, tp, pp, shards))
        write_atomically(part / manifests.NAME, text, durable=True)  # last: now it is complete
    return Path(out)


def merge(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Merge the shards in ``folder`` into a checkpoint for ``from_pretrained(out)``.

    Every file is compared with the manifest, byte for byte, before anything is written. More than `FILE_BYTES` of
    weights become several files and an index.

    Raises:
        FileExistsError: ``out`` exists already, and is not empty.
        CheckpointError: a shard is missing or damaged; the manifest does not fit the model; copies of one tensor
            differ; the disk is full. The sentence says which.
    """
    source = Path(folder)
    manifest = manifests.read(source)
    architecture = read_architecture(source)
    with Reader() as reader, new_folder(Path(out)) as part:
        _check_files(source, manifest)
        tables = {place: reader.table(source / manifest.file(*place)) for place in manifest.shards}
        stages = _stages_of(architecture, manifest, tables, source / manifests.NAME)

        def get(rank: int, stage: int, name: str) -> torch.Tensor:
            return reader.slices(source / manifest.file(rank, stage), name)[:]

        def info(stage: int, piece: Piece) -> dict[str, TensorInfo]:
            dtype = tables[0, stage][piece.name][0]
            shapes = ((piece.rows or shape[0], *shape[1:]) for shape in piece.shapes)
            return {name: (dtype, shape) for name, shape in zip(piece.sources, shapes, strict=True)}

        with checkpoint_errors(source):
            kept = [(stage, piece, info(stage, piece)) for stage, piece in once(stages, manifest.tp, get)]
        groups = _fill_files(kept)
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            table = {name: one for _, _, infos in group for name, one in infos.items()}
            tensors = (
                pair
                for stage, piece, _ in group
                for pair in whole(piece, manifest.tp, lambda rank, shard, stage=stage: get(rank, stage, shard))
            )
            with checkpoint_errors(source):
                write(part / name, table, tensors)
            weight_map |= dict.fromkeys(table, name)
        if len(groups) > 1:
            size = sum(num_bytes(one) for _, _, infos in kept for one in infos.values())
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            write_atomically(part / INDEX, json.dumps(index, indent=2) + "\n", durable=True)
        _copy_other_files(source, part)
    return Path(out)


def seal(folder: str | os.PathLike[str], *, tp: int, pp: int, layout: str = "hugging_face") -> Path:
    """Write the manifest of shards that a training run wrote (or trained on) in ``folder``, beside its config.json.

    Names and shapes are compared with the configuration's first. Returns the manifest's path.
    """
    source = Path(folder)
    architecture = read_architecture(source)
    ends(layout)
    architecture.check_grid(tp, pp, padded=True)  # whether it is padded, the shards will show
    paths = {
        (rank, stage): source / manifests.shard_name(layout, tp, pp, rank, stage)
        for rank in range(tp)
        for stage in range(pp)
    }
    with Reader() as reader:
        tables = {place: reader.table(path) for place, path in paths.items()}
    shards = {place: Shard(path.stat().st_size, digest(path)) for place, path in paths.items()}
    manifest = Manifest(layout, tp, pp, shards)
    _stages_of(architecture, manifest, tables, source)
    write_atomically(source / manifests.NAME, manifests.to_json(manifest), durable=True)
    return source / manifests.NAME


def read_architecture(folder: Path) -> Architecture:
    """Read config.json. Raises CheckpointError if it is missing, damaged or of a model that is not converted here."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: no checkpoint is there.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: damaged ({error}).") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no table of settings: damaged.")
    with checkpoint_errors(path):
        Architecture.of(config)
        from transformers import AutoConfig

        try:
            return Architecture.of(AutoConfig.for_model(**config))  # which knows the defaults of missing keys
        except Exception as error:  # whatever transformers' validation makes of it
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"transformers does not take it ({why}).") from error


@contextmanager
def checkpoint_errors(path: Path, note: str = "") -> Iterator[None]:
    """Turn a ValueError about tensors into a CheckpointError that names the checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}{note}: {error}") from error


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside its place, and rename it at the end; an error, or Ctrl-C, leaves nothing of it."""
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
        raise CheckpointError(f"{target} was not written: {reason(error)}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _stages_of(
    architecture: Architecture,
    manifest: Manifest,
    tables: dict[tuple[int, int], dict[str, TensorInfo]],
    path: Path,
) -> list[list[Piece]]:
    """Return the pieces of each stage, after comparing every tensor's name and shape with config.json."""
    shapes = {place: {name: shape for name, (_, shape) in table.items()} for place, table in tables.items()}
    with checkpoint_errors(path, f" (it does not fit {CONFIG})"):
        return fitting(architecture, manifest.tp, manifest.pp, manifest.layout, shapes)


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Compare sizes first, which costs nothing, then every byte."""
    paths = {place: folder / manifest.file(*place) for place in manifest.shards}
    for (rank, stage), path in paths.items():
        if not path.is_file():
            raise CheckpointError(f"{path}, the shard of tp rank {rank} and stage {stage}, is missing.")
    same_size = all(paths[place].stat().st_size == shard.bytes for place, shard in manifest.shards.items())
    for place, shard in manifest.shards.items():
        if paths[place].stat().st_size != shard.bytes or (same_size and digest(paths[place]) != shard.sha256):
            raise CheckpointError(
                f"{paths[place]} has other bytes than {manifests.NAME} says: damaged; or, if it was trained since, "
                "seal the folder again."
            )


def _check_tied(architecture: Architecture, files: dict[str, Path], reader: Reader) -> None:
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    if architecture.tied and output in files:
        if not same(*(reader.slices(files[name], name)[:] for name in (embedding, output))):
            raise CheckpointError(f"its {output} differs from {embedding}, and {CONFIG} ties them: set one straight.")


def _copy_other_files(source: Path, target: Path) -> None:
    """Copy config.json, the tokenizer and everything else that holds no weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COPIED and path.name not in (INDEX, manifests.NAME):
            shutil.copyfile(path, target / path.name)


def _fill_files(
    kept: list[tuple[int, Piece, dict[str, TensorInfo]]],
) -> list[list[tuple[int, Piece, dict[str, TensorInfo]]]]:
    """Group the pieces by file of weights: as many in each as fit."""
    files: list[list[tuple[int, Piece, dict[str, TensorInfo]]]] = [[]]
    filled = 0
    for entry in kept:
        size = sum(map(num_bytes, entry[2].values()))
        if files[-1] and filled + size > FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += size
    return files
