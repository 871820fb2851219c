"""Split one tensor for a rank and join it again, and whole models as tables of tensors. No file is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from course_tools.conversion.architecture import EMBEDDING, OUTPUT, Architecture, compare
from course_tools.conversion.pieces import MEGATRON_ENDS, Piece, pieces

State = Mapping[str, torch.Tensor]
Place = tuple[int, int]  # (tensor-parallel rank, pipeline stage)
Source = tuple[Piece, int, list[torch.Tensor]]  # what `rejoin` needs for one tensor of the whole model
COMPUTED = ".rotary_emb.inv_freq"  # a buffer that old Llama checkpoints hold; transformers computes it from config.json


def join(parts: list[torch.Tensor], groups: int = 1) -> torch.Tensor:
    """Fuse tensors [rows_i, …] group by group, a share of each in turn. Returns [sum of rows, …]."""
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def separate(fused: torch.Tensor, rows: list[int], groups: int = 1) -> list[torch.Tensor]:
    """Undo ``join``: return the parts, each with its number of rows."""
    shares = fused.reshape(groups, -1, *fused.shape[1:]).split([count // groups for count in rows], dim=1)
    return [share.flatten(0, 1) for share in shares]


def cut(piece: Piece, tp: int, rank: int, state: State) -> torch.Tensor:
    """Return one rank's tensor of a piece of the whole model, in memory of its own."""
    parts = []
    for name, shape in zip(piece.sources, piece.shapes, strict=True):
        source = state[name].detach()
        if piece.cut == "columns":
            source = source.chunk(tp, dim=1)[rank]
        elif piece.cut == "rows":
            count = shape[0] // tp
            source = source[rank * count : (rank + 1) * count]
            if len(source) < count:  # the last rows of a padded vocabulary
                source = torch.cat([source, source.new_zeros(count - len(source), *shape[1:])])
        parts.append(source)
    if len({part.dtype for part in parts}) > 1:
        raise ValueError(f"{' and '.join(piece.sources)} have different dtypes and cannot be fused into {piece.name}.")
    return join(parts, piece.groups)


def rejoin(piece: Piece, number: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return one whole source of a piece, by its number, from every tensor-parallel rank's tensor.

    Raises ValueError if a tensor that every rank holds whole is not the same on all of them.
    """
    if len({part.dtype for part in parts}) > 1:
        raise ValueError(f"{piece.name} has another dtype on one tp rank than on another.")
    if piece.cut == "columns":
        return torch.cat(parts, dim=1)
    if piece.cut == "whole":
        for rank, part in enumerate(parts):
            if not same(part, parts[0]):
                raise ValueError(
                    f"{piece.name} of tp rank {rank} differs from tp rank 0's, and all should hold the same: "
                    "training let them drift apart, as where sequence parallelism does not sum their gradients."
                )
        return parts[0].clone()
    rows = [shape[0] // len(parts) for shape in piece.shapes]
    whole = torch.cat([separate(part, rows, piece.groups)[number] for part in parts])
    return whole[: piece.rows] if piece.rows else whole


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare byte for byte, so that a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def split_state(
    state: State, config: Any, *, tp: int, pp: int, layout: str = "hugging_face"
) -> dict[Place, dict[str, torch.Tensor]]:
    """Split ``model.state_dict()`` for ``tp`` ranks times ``pp`` stages; each shard has memory of its own.

    Args:
        config: ``model.config``, of any model with Llama's tensors.
        layout: "hugging_face" (the same names, layers counted from 0 in each stage); "megatron" (Megatron-core's names
            and fused matrices, and its vocabulary, padded by rows of zeros to a multiple of 128 * tp); "megatron_local"
            (the same with the norms as layers of their own, as without Transformer Engine).

    Raises ValueError: a grid that does not divide the model; tensors that are not the model's.
    """
    architecture = Architecture.of(config)
    stages = pieces(architecture, tp=tp, pp=pp, layout=layout)
    check_whole(architecture, state, "The model")
    return {
        (rank, stage): {piece.name: cut(piece, tp, rank, state) for piece in found}
        for rank in range(tp)
        for stage, found in enumerate(stages)
    }


def merge_state(shards: Mapping[Place, State], config: Any, *, layout: str) -> dict[str, torch.Tensor]:
    """Undo ``split_state``: the tensors for ``model.load_state_dict``, tied ones under both names, padding cut off.

    Raises ValueError: a shard or a tensor is missing, too many or of another shape; copies that should be equal are not.
    """
    architecture = Architecture.of(config)
    merged = {name: rejoin(*source) for name, source in sources_in(shards, architecture, layout).items()}
    return merged | ({OUTPUT: merged[EMBEDDING]} if architecture.tied else {})


def check_whole(architecture: Architecture, state: State, whose: str) -> None:
    """Raise ValueError if these are not the whole model's tensors, or two copies of a tied embedding differ."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if not name.endswith(COMPUTED)}
    if architecture.tied:
        shapes.pop(OUTPUT, None)
    compare(architecture.tensors, shapes, whose)
    if architecture.tied and not same(state.get(OUTPUT, state[EMBEDDING]), state[EMBEDDING]):
        raise ValueError(f"{OUTPUT} differs from {EMBEDDING}, and the configuration ties them: set one straight.")


def sources_in(shards: Mapping[Place, State], architecture: Architecture, layout: str) -> dict[str, Source]:
    """Return what ``rejoin`` needs for every tensor of the whole model, in its order; nothing is joined yet.

    Layout "megatron" takes Megatron's names with and without Transformer Engine, and any padding. Raises ValueError: a
    shard or a tensor is missing, too many or of another shape; the copies of a tied embedding differ.
    """
    if not shards:
        raise ValueError("There are no shards: give {(tp rank, stage): state}.")
    tp, pp = (1 + max(place[axis] for place in shards) for axis in (0, 1))
    for place in set(product(range(tp), range(pp))) - set(shards):
        raise ValueError(f"The shard of tp rank {place[0]} and stage {place[1]} is missing, of tp={tp}, pp={pp}.")
    if layout == "megatron" and "decoder.layers.0.input_layernorm.weight" in shards[0, 0]:
        layout = "megatron_local"
    rows = tp * len(shards[0, 0].get(MEGATRON_ENDS[0], ()))
    padded_to = rows if rows >= architecture.vocab else None  # fewer rows are the wrong shape, which is told below
    stages = pieces(architecture, tp=tp, pp=pp, layout=layout, vocab_rows=padded_to)
    for (rank, stage), shard in sorted(shards.items()):
        wanted = {piece.name: piece.shape(tp) for piece in stages[stage]}
        shapes = {name: tuple(tensor.shape) for name, tensor in shard.items()}
        compare(wanted, shapes, f"The shard of tp rank {rank} and stage {stage}")
    found: dict[str, Source] = {}
    for stage, piece in ((stage, piece) for stage, these in enumerate(stages) for piece in these):
        parts = [shards[rank, stage][piece.name].detach() for rank in range(tp)]
        for number, source in enumerate(piece.sources):
            first = found.setdefault(source, (piece, number, parts))
            if first[2] is not parts and not all(map(same, first[2], parts)):
                raise ValueError(
                    f"{piece.name} of stage {stage} differs from {first[0].name} of stage 0, and the embeddings are tied: "
                    "their gradients were not summed over the two stages."
                )
    return {name: found[name] for name in architecture.tensors}
