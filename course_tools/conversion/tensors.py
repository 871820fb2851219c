"""Split one tensor for a rank and join it again, and whole models as tables of tensors. No file is touched here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from course_tools.conversion.architecture import Architecture
from course_tools.conversion.pieces import LAYOUTS, Piece, ends, pieces

Place = tuple[int, int]  # (tensor-parallel rank, pipeline stage)
COMPUTED = ".rotary_emb.inv_freq"  # a buffer that old Llama checkpoints hold; transformers computes it from config.json


def join(parts: list[torch.Tensor], groups: int = 1) -> torch.Tensor:
    """Fuse tensors [rows_i, …] group by group, a share of each in turn. Returns [sum of rows, …]."""
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def separate(fused: torch.Tensor, rows: list[int], groups: int = 1) -> list[torch.Tensor]:
    """Undo ``join``: return the parts, each with its number of rows."""
    shares = fused.reshape(groups, -1, *fused.shape[1:]).split([count // groups for count in rows], dim=1)
    return [share.flatten(0, 1) for share in shares]


def cut(piece: Piece, tp: int, rank: int, sources: list[Any]) -> torch.Tensor:
    """Return one rank's tensor of a piece, in memory of its own.

    Its sources are tensors, or anything that gives tensors when it is sliced.
    """
    parts = []
    for source, shape in zip(sources, piece.shapes, strict=True):
        if piece.cut == "columns":
            width = shape[1] // tp
            parts.append(source[:, rank * width : (rank + 1) * width])
        elif piece.cut == "rows":
            count = shape[0] // tp
            end = min((rank + 1) * count, piece.rows or shape[0])
            part = source[min(rank * count, end) : end]
            if len(part) < count:  # the last rows of a padded vocabulary
                part = torch.cat([part, part.new_zeros(count - len(part), *shape[1:])])
            parts.append(part)
        else:
            parts.append(source[:])
    if len({part.dtype for part in parts}) > 1:
        raise ValueError(f"{' and '.join(piece.sources)} have different dtypes and cannot be fused into {piece.name}.")
    return join(parts, piece.groups)


def rejoined(piece: Piece, tp: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the whole sources of a piece, from every tensor-parallel rank's tensor.

    Raises ValueError if a tensor that every rank holds whole is not the same on all of them.
    """
    if piece.cut == "columns":
        return [torch.cat(parts, dim=1)]
    if piece.cut == "whole":
        for rank, part in enumerate(parts):
            if not same(part, parts[0]):
                raise ValueError(
                    f"{piece.name} of tp rank {rank} differs from tp rank 0's, and all should hold the same: "
                    "training let them drift apart, as where sequence parallelism does not sum their gradients."
                )
        return [parts[0].clone()]
    rows = [shape[0] // tp for shape in piece.shapes]
    by_source = zip(*(separate(part, rows, piece.groups) for part in parts), strict=True)
    tensors = [torch.cat(shares) for shares in by_source]
    return [tensor[: piece.rows] for tensor in tensors] if piece.rows else tensors


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare byte for byte, so that a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def whole(piece: Piece, tp: int, get: Callable[[int, str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole sources of a piece by name; ``get(tp rank, name)`` reads a tensor of its stage. Raises as ``rejoined``."""
    parts = [get(rank, piece.name) for rank in range(tp)]
    if len({part.dtype for part in parts}) > 1:
        raise ValueError(f"{piece.name} has another dtype on one tp rank than on another.")
    yield from zip(piece.sources, rejoined(piece, tp, parts), strict=True)


def once(stages: list[list[Piece]], tp: int, get: Callable[[int, int, str], torch.Tensor]) -> list[tuple[int, Piece]]:
    """Return (stage, piece) of all pieces except the second copy of a tied embedding, which must equal the first.

    ``get(tp rank, stage, name)`` reads a tensor. Raises ValueError if the copies differ.
    """
    found: dict[tuple[str, ...], tuple[int, Piece]] = {}
    for stage, piece in ((stage, piece) for stage, these in enumerate(stages) for piece in these):
        first, original = found.setdefault(piece.sources, (stage, piece))
        for rank in range(tp) if original is not piece else ():
            if not same(get(rank, stage, piece.name), get(rank, first, original.name)):
                raise ValueError(
                    f"{piece.name} of stage {stage} differs from {original.name} of stage {first} on tp rank {rank}, "
                    "and the embeddings are tied: their gradients were not summed over the two stages."
                )
    return list(found.values())


def split_state(
    state: Mapping[str, torch.Tensor],
    config: Any,
    *,
    tp: int,
    pp: int,
    layout: str = "hugging_face",
    pad_vocab: bool = False,
) -> dict[Place, dict[str, torch.Tensor]]:
    """Split ``model.state_dict()`` for ``tp`` ranks times ``pp`` stages; each shard has memory of its own.

    Args:
        config: ``model.config``, or its table; Llama, Qwen2 or Qwen3.
        layout: "hugging_face" (the same names, layers counted from 0 in each stage) or "megatron" (Megatron-core's names
            and fused matrices).
        pad_vocab: with "megatron", add rows of zeros to embedding and output layer up to a multiple of 128 * tp. Whoever
            computes a loss with them leaves the logits of those rows out.

    Raises ValueError: a grid that does not divide the model; tensors that are not the model's.
    """
    architecture = Architecture.of(config)
    stages = pieces(architecture, tp=tp, pp=pp, layout=layout, vocab_rows=padding(architecture, tp, layout, pad_vocab))
    state = {name: tensor.detach() for name, tensor in state.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_whole(architecture, shapes, "The model")
    if architecture.tied and not same(state.get("lm_head.weight", (e := state["model.embed_tokens.weight"])), e):
        raise ValueError(
            "lm_head.weight differs from model.embed_tokens.weight, and config ties them: set one straight."
        )
    return {
        (rank, stage): {
            piece.name: cut(piece, tp, rank, [state[source] for source in piece.sources]) for piece in found
        }
        for rank in range(tp)
        for stage, found in enumerate(stages)
    }


def merge_state(
    shards: Mapping[Place, Mapping[str, torch.Tensor]], config: Any, *, layout: str
) -> dict[str, torch.Tensor]:
    """Undo ``split_state``: the tensors for ``model.load_state_dict``, tied ones under both names, padding cut off.

    Raises ValueError: a shard or a tensor is missing, too many or of another shape; copies that should be equal are not.
    """
    architecture = Architecture.of(config)
    if not shards:
        raise ValueError("There are no shards: give {(tp rank, stage): state}.")
    tp, pp = (1 + max(place[axis] for place in shards) for axis in (0, 1))
    for place in set(shards) ^ {(rank, stage) for rank in range(tp) for stage in range(pp)}:
        raise ValueError(
            f"The shard {place} is missing, or no place of tp={tp}, pp={pp}: there are {len(shards)} shards."
        )
    shapes = {place: {name: tuple(t.shape) for name, t in shard.items()} for place, shard in shards.items()}
    stages = fitting(architecture, tp, pp, layout, shapes)

    def get(rank: int, stage: int, name: str) -> torch.Tensor:
        return shards[rank, stage][name].detach()

    found: dict[str, torch.Tensor] = {}
    for stage, piece in once(stages, tp, get):
        found.update(whole(piece, tp, lambda rank, name, stage=stage: get(rank, stage, name)))
    return found | ({"lm_head.weight": found["model.embed_tokens.weight"]} if architecture.tied else {})


def padding(architecture: Architecture, tp: int, layout: str, pad_vocab: bool) -> int | None:
    """Return the rows of the padded vocabulary, or None. Raises ValueError if the layout has no padding."""
    if not pad_vocab or type(tp) is not int or tp < 1:  # check_grid refuses a tp that makes no sense
        return None
    if layout == "hugging_face":
        raise ValueError("pad_vocab goes with layout='megatron': transformers has no padded vocabulary.")
    return architecture.padded_vocab(tp)


def check_whole(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], whose: str) -> None:
    """Raise ValueError if the whole model lacks a tensor, has one too many, or one of another shape."""
    wanted = {
        source: shape
        for piece in pieces(architecture, tp=1, pp=1)[0]
        for source, shape in zip(piece.sources, piece.shapes, strict=True)
    }
    optional = {"lm_head.weight"} if architecture.tied else set()
    optional |= {name for name in shapes if name.endswith(COMPUTED)}
    compare(wanted, {name: shape for name, shape in shapes.items() if name not in optional}, whose)


def fitting(
    architecture: Architecture, tp: int, pp: int, layout: str, shards: Mapping[Place, Mapping[str, tuple[int, ...]]]
) -> list[list[Piece]]:
    """Return the pieces of these shards, padded or not, after comparing every name and shape. Raises ValueError."""
    rows = tp * shards[0, 0].get(ends(layout)[0], (0,))[0]
    padded = layout == "megatron" and rows == architecture.padded_vocab(tp)
    stages = pieces(architecture, tp=tp, pp=pp, layout=layout, vocab_rows=rows if padded else None)
    for (rank, stage), shapes in sorted(shards.items()):
        wanted = {piece.name: piece.shape(tp) for piece in stages[stage]}
        other = next(one for one in LAYOUTS if one != layout)
        hint = f": are these of layout {other}?" if shapes and not set(wanted) & set(shapes) else ""
        compare(wanted, shapes, f"The shard of tp rank {rank} and stage {stage}", hint)
    return stages


def compare(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], whose: str, hint: str = ""
) -> None:
    """Raise ValueError for the first tensor that is missing, of another shape, or too many."""
    for name, shape in wanted.items():
        if name not in found:
            raise ValueError(f"{whose} lacks the tensor {name}{hint or '.'}")
        if tuple(found[name]) != shape:
            raise ValueError(f"{whose} has {name} of shape {list(found[name])} instead of {list(shape)}.")
    for name in found:
        if name not in wanted:
            raise ValueError(f"{whose} has a tensor {name} that the model's configuration does not know.")
