"""``split``: a Hugging Face checkpoint cut into shards; ``seal``: the manifest of shards that a training run wrote."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

from course_lib.checkpoints.errors import CheckpointError
from course_lib.checkpoints.manifest import digest
from course_tools.conversion import manifest
from course_tools.conversion.architecture import Architecture
from course_tools.conversion.folders import CONFIG, appearing, architecture_of, copy_others, told_of, write_text
from course_tools.conversion.manifest import Manifest, Shard
from course_tools.conversion.pieces import ends, pieces
from course_tools.conversion.tensor_files import Reader, weight_files, write
from course_tools.conversion.tensors import check_whole, cut, fitting, padding, same


def split(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tp: int,
    pp: int,
    layout: str = "hugging_face",
    pad_vocab: bool = False,
) -> Path:
    """Cut the Hugging Face checkpoint in ``folder`` into ``tp`` times ``pp`` shards; one tensor at a time is in memory.

    ``out`` gets a safetensors file a shard ("megatron": mp_rank_TT_PPP/model.safetensors), config.json and the tokenizer's
    files, and manifest.json. It appears when it is whole. ``layout`` and ``pad_vocab`` are those of ``split_state``.

    Raises:
        ValueError: a grid that does not divide the model, a model that is none of Llama, Qwen2 and Qwen3.
        FileExistsError: ``out`` is there already, and not empty.
        CheckpointError: the checkpoint lacks something, or is damaged; the disk is full.
    """
    source = Path(folder)
    architecture = architecture_of(source)
    stages = pieces(architecture, tp=tp, pp=pp, layout=layout, vocab_rows=padding(architecture, tp, layout, pad_vocab))
    with Reader() as reader, appearing(Path(out)) as part:
        files = weight_files(source, reader)
        about = {name: reader.table(path)[name] for name, path in files.items()}
        with told_of(source):
            check_whole(architecture, {name: shape for name, (_, shape) in about.items()}, "its checkpoint")
            _check_tie(architecture, files, reader)
        shards: dict[tuple[int, int], Shard] = {}
        for rank, stage in ((rank, stage) for stage in range(pp) for rank in range(tp)):
            path = part / manifest.shard_name(layout, tp, pp, rank, stage)
            path.parent.mkdir(exist_ok=True)
            wanted = {piece.name: (about[piece.sources[0]][0], piece.shape(tp)) for piece in stages[stage]}
            tensors = (
                (piece.name, cut(piece, tp, rank, [reader.slices(files[name], name) for name in piece.sources]))
                for piece in stages[stage]
            )
            with told_of(source):
                shards[rank, stage] = Shard(*write(path, wanted, tensors), wanted)
        copy_others(source, part)
        write_text(part / manifest.NAME, manifest.to_json(Manifest(layout, tp, pp, shards)))  # last: now it is whole
    return Path(out)


def seal(folder: str | os.PathLike[str], *, tp: int, pp: int, layout: str = "hugging_face") -> Path:
    """Write the manifest of shards that a training run wrote (or trained on) in ``folder``, beside its config.json.

    Names and shapes are compared with the configuration's first. Returns the manifest's path.

    Raises ValueError (CheckpointError for a missing or damaged file) with what does not fit; the folder stays as it was.
    """
    where = Path(folder)
    architecture = architecture_of(where)
    ends(layout)
    architecture.check_grid(tp, pp, padded=True)  # whether it is padded, the shards will show
    shards = {}
    with Reader() as reader:
        for rank, stage in ((rank, stage) for rank in range(tp) for stage in range(pp)):
            path = where / manifest.shard_name(layout, tp, pp, rank, stage)
            shards[rank, stage] = Shard(path.stat().st_size if path.exists() else 0, "", reader.table(path))
    told = Manifest(layout, tp, pp, shards)
    with told_of(where):
        fitting(architecture, tp, pp, layout, told.shapes())
    for place, shard in shards.items():
        shards[place] = Shard(shard.bytes, digest(where / told.file(*place)), shard.tensors)
    part = where / f".{manifest.NAME}.part-{uuid4().hex[:8]}"
    try:
        write_text(part, manifest.to_json(told))
        os.replace(part, where / manifest.NAME)
    finally:
        part.unlink(missing_ok=True)
    return where / manifest.NAME


def _check_tie(architecture: Architecture, files: dict[str, Path], reader: Reader) -> None:
    first, second = "model.embed_tokens.weight", "lm_head.weight"
    if architecture.tied and second in files:
        if not same(reader.slices(files[first], first)[:], reader.slices(files[second], second)[:]):
            raise CheckpointError(f"its {second} differs from {first}, and {CONFIG} ties them: set one straight.")
