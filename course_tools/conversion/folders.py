"""Checkpoints on disk: `split` a Hugging Face one into shards, `merge` shards into one.

One tensor at a time is in memory. What is written appears under its name when it is complete, by one rename.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from course_lib.checkpoints.errors import CheckpointError, reason
from course_lib.checkpoints.folder import fsync_folder
from course_lib.files import write_atomically
from course_tools.conversion.architecture import NORM, PAD_TO, Architecture
from course_tools.conversion.files import INDEX, load, load_checkpoint, load_megatron, write, write_megatron
from course_tools.conversion.pieces import Piece, pieces
from course_tools.conversion.tensors import Place, check_whole, cut, rejoin, sources_in

CONFIG = "config.json"
TRACKER = "latest_checkpointed_iteration.txt"  # which of its checkpoints Megatron continues from
COPIED = {".json", ".txt", ".model", ".jinja", ".md"}  # tokenizer, generation settings, model card
FILE_BYTES = 50_000_000_000  # the largest file that the Hugging Face Hub takes
Folder = str | os.PathLike[str]


def split(folder: Folder, out: Folder, *, tp: int, pp: int, layout: str = "hugging_face") -> Path:
    """Split the Hugging Face checkpoint in ``folder`` into ``tp`` times ``pp`` shards.

    ``out`` gets one safetensors file per shard, or in Megatron's layouts iter_0000001/mp_rank_TT_PPP/model_optim_rng.pt
    and what Megatron needs to find it; besides config.json and the tokenizer's files. ``layout`` is that of
    ``split_state``.

    Raises:
        ValueError: a grid that does not divide the model.
        FileExistsError: ``out`` exists already, and is not empty.
        CheckpointError: the model has other tensors than Llama's; the checkpoint lacks something, or is damaged; the
            disk is full.
    """
    source = Path(folder)
    architecture, config = read_architecture(source)
    stages = pieces(architecture, tp=tp, pp=pp, layout=layout)
    with new_folder(Path(out), source) as part:
        state = load_checkpoint(source)
        check_whole(architecture, state, "Its checkpoint")
        for rank, stage in product(range(tp), range(pp)):
            found = {piece.name: piece for piece in stages[stage]}
            wanted = {
                name: torch.empty(piece.shape(tp), dtype=state[piece.sources[0]].dtype, device="meta")
                for name, piece in found.items()
            }

            def get(name: str, found: dict[str, Piece] = found, rank: int = rank) -> torch.Tensor:
                return cut(found[name], tp, rank, state)

            if layout == "hugging_face":
                write(part / shard_name(layout, tp, pp, rank, stage), wanted, get)
            else:
                path = part / "iter_0000001" / shard_name(layout, tp, pp, rank, stage)
                path.parent.mkdir(parents=True)
                write_megatron(path, wanted, get, megatron_args(architecture, config, tp, pp))
                write_atomically(part / TRACKER, "1", durable=True)
        _copy_other_files(source, part)
    return Path(out)


def merge(folder: Folder, out: Folder) -> Path:
    """Merge the shards in ``folder`` into a checkpoint for ``from_pretrained(out)``.

    Their files say which layout it is. A checkpoint that Megatron wrote (``--ckpt-format torch``) needs the model's
    config.json beside it. More than `FILE_BYTES` of weights become several files and an index.

    Raises:
        FileExistsError: ``out`` exists already, and is not empty.
        CheckpointError: a shard is missing or damaged, or does not fit the model; copies of one tensor differ; the disk
            is full. The sentence says which.
    """
    source = Path(folder)
    architecture, _ = read_architecture(source)
    with new_folder(Path(out), source) as part:
        layout, shards = load_shards(source)
        sources = sources_in(shards, architecture, layout)
        wanted = {
            name: torch.empty(architecture.tensors[name], dtype=parts[0].dtype, device="meta")
            for name, (_, _, parts) in sources.items()
        }
        plan = split_state_dict_into_shards_factory(
            wanted,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=FILE_BYTES,
        )
        for file, names in plan.filename_to_tensors.items():
            write(part / file, {name: wanted[name] for name in names}, lambda name: rejoin(*sources[name]))
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            write_atomically(part / INDEX, json.dumps(index, indent=2) + "\n", durable=True)
        _copy_other_files(source, part)
    return Path(out)


def shard_name(layout: str, tp: int, pp: int, rank: int, stage: int) -> str:
    """Name a shard's file; Megatron leaves _PPP out at pp=1."""
    if layout == "hugging_face":
        return f"tp-{rank + 1:02d}-of-{tp:02d}_pp-{stage + 1:02d}-of-{pp:02d}.safetensors"
    return f"mp_rank_{rank:02d}{f'_{stage:03d}' if pp > 1 else ''}/model_optim_rng.pt"


def load_shards(folder: Path) -> tuple[str, dict[Place, dict[str, torch.Tensor]]]:
    """Map all shards in a folder into memory. Returns their layout, and them by (tp rank, stage)."""
    if (folder / TRACKER).is_file():
        return "megatron", _load_megatron_shards(folder)
    matches = (re.fullmatch(r"tp-\d+-of-(\d+)_pp-\d+-of-(\d+)\.safetensors", path.name) for path in folder.iterdir())
    grids = {(int(match[1]), int(match[2])) for match in matches if match}
    if len(grids) != 1:
        raise CheckpointError(f"{folder} holds neither one split's tp-….safetensors nor a {TRACKER} of Megatron's.")
    tp, pp = grids.pop()
    names = {place: shard_name("hugging_face", tp, pp, *place) for place in product(range(tp), range(pp))}
    return "hugging_face", {place: load(folder / name) for place, name in names.items()}


def _load_megatron_shards(folder: Path) -> dict[Place, dict[str, torch.Tensor]]:
    """The tracker says which checkpoint it is, and the arguments in every file for how many ranks."""
    iteration = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    latest = folder / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else "release")
    paths = sorted(latest.glob("mp_rank_*/model_optim_rng.pt"))
    if not paths:
        raise CheckpointError(f"{latest} holds no mp_rank_*/model_optim_rng.pt: let Megatron save --ckpt-format torch.")
    _, args = load_megatron(paths[0])
    tp, pp = (getattr(args, f"{axis}_model_parallel_size", None) for axis in ("tensor", "pipeline"))
    if type(tp) is not int or type(pp) is not int:
        raise CheckpointError(f"{paths[0]} does not say for how many ranks Megatron saved it.")
    names = {place: shard_name("megatron", tp, pp, *place) for place in product(range(tp), range(pp))}
    return {place: load_megatron(latest / name)[0] for place, name in names.items()}


def megatron_args(a: Architecture, config: Any, tp: int, pp: int) -> Namespace:
    """Return what Megatron compares when it loads (check_checkpoint_args), and what --use-checkpoint-args reads."""
    return Namespace(
        num_layers=a.layers,
        hidden_size=a.tensors[NORM][0],
        ffn_hidden_size=a.intermediate,
        num_attention_heads=a.heads,
        group_query_attention=a.kv_heads < a.heads,
        num_query_groups=a.kv_heads,
        kv_channels=a.head_dim,
        padded_vocab_size=a.padded_vocab(tp),
        make_vocab_size_divisible_by=PAD_TO,
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
        add_position_embedding=False,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=getattr(config, "hidden_act", "silu") == "silu",
        add_bias_linear="mlp.up_proj.bias" in a.layer,
        add_qkv_bias="self_attn.q_proj.bias" in a.layer,
        qk_layernorm="self_attn.q_norm.weight" in a.layer,
        untie_embeddings_and_output_weights=not a.tied,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )


def read_architecture(folder: Path) -> tuple[Architecture, Any]:
    """Read config.json. Raises CheckpointError if it is missing, damaged or of a model that is not converted here."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: put the one of the Hugging Face model there.")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
        return Architecture.of(config), config
    except Exception as error:  # ours, or whatever transformers makes of a configuration that is none
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(f"{path}: {why}") from error


@contextmanager
def new_folder(target: Path, source: Path) -> Iterator[Path]:
    """Give a folder beside its place, and rename it at the end; an error, or Ctrl-C, leaves nothing of it.

    What is wrong with the tensors of ``source`` becomes a CheckpointError that names it.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already: give a folder that is empty or not there yet.")
    part = target.with_name(f".{target.name}.part-{uuid4().hex[:8]}")
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        part.mkdir(parents=True)
        yield part
        for folder in [path for path in part.rglob("*") if path.is_dir()] + [part]:
            fsync_folder(folder)
        os.replace(part, target)  # an empty folder may stand in its place
        fsync_folder(target.parent)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error
    except (OSError, RuntimeError) as error:  # torch's writer of zip files has an error of its own for a full disk
        raise CheckpointError(f"{target} was not written: {reason(error)}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):  # it holds what was made
                parent.rmdir()


def _copy_other_files(source: Path, target: Path) -> None:
    """Copy config.json, the tokenizer and everything else that holds no weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in COPIED and path.name not in (INDEX, TRACKER):
            shutil.copyfile(path, target / path.name)
