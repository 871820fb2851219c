"""Lab 8, exercise 6: the shards of a GQA model in Megatron's layout, back to one Hugging Face checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from course_checks.harness import NotYet, returned
from course_checks.lab08.common import lab

TP = (2, 4, 1)
Tensors = dict[str, torch.Tensor]


class Widths(NamedTuple):
    """What the exercise's model is built from. Eight query heads share four key/value heads; 250 tokens get padded."""

    layers: int = 2
    hidden: int = 64
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 96
    vocab: int = 250


WIDTHS = Widths()


@lab.exercise("Merging the shards of a GQA model", importance=4, difficulty=4, minutes=30)
def merge(merge_shards: Callable[..., Any]) -> str:
    """Every tensor byte for byte, at TP 1, 2 and 4; the merged model's logits; the shards as they were."""
    from course_lib.models import tiny_llama  # here: every rank of this lab imports this module

    model = tiny_llama(seed=3, **WIDTHS._asdict())
    with torch.no_grad():  # norms begin as ones, and then nobody sees which is which
        for name, p in model.named_parameters():
            if "norm" in name:
                p.normal_(1.0, 0.1, generator=torch.Generator().manual_seed(len(name) + int(p.numel())))
    state = {name: p.detach() for name, p in model.named_parameters()}
    for ranks in TP:
        shards = cut(state, model.config, ranks)
        given = [dict(shard) for shard in shards]
        merged = returned(merge_shards(given, model.config), Mapping, "the merged checkpoint")
        _names(merged, state, ranks)
        for name, expected in state.items():
            _tensor(merged[name], expected, name, shards, ranks)
        apart = _logits_apart(model, merged)
        assert apart == 0.0, "equal tensors and other logits"
    elements = sum(tensor.numel() for tensor in state.values())
    return f"{len(state)} tensors, {elements:,} elements, byte for byte from 1, 2 and 4 shards; the logits differ by {apart:g}"


def cut(state: Tensors, config: Any, ranks: int) -> list[Tensors]:
    """The shards of TP=`ranks`, in Megatron-core's names and layout, by tensor-parallel rank."""
    from course_tools.conversion import split_state

    shards = split_state(
        {n: t.clone() for n, t in state.items()}, config, tp=ranks, pp=1, layout="megatron", pad_vocab=True
    )
    return [shards[rank, 0] for rank in range(ranks)]


def _logits_apart(model: Any, merged: Mapping[str, torch.Tensor]) -> float:
    twin = copy.deepcopy(model)
    twin.load_state_dict(dict(merged))
    tokens = torch.arange(32).view(2, 16) * 7 % WIDTHS.vocab
    with torch.no_grad():
        return (twin(tokens).logits - model(tokens).logits).abs().max().item()


def _names(merged: Mapping[str, Any], state: Tensors, ranks: int) -> None:
    missing, extra = [n for n in state if n not in merged], [n for n in merged if n not in state]
    if missing:
        raise NotYet(
            f"TP={ranks}: the merged checkpoint lacks {missing[0]}"
            + (f" (and {len(missing) - 1} more)" * (len(missing) > 1))
        )
    if extra:
        raise NotYet(f"TP={ranks}: the merged checkpoint has {extra[0]!r}, which the Hugging Face model does not")


def _tensor(mine: Any, expected: torch.Tensor, name: str, shards: list[Tensors], ranks: int) -> None:
    where = f"TP={ranks}: {name}"
    mine = returned(mine, torch.Tensor, where)
    if mine.dtype != expected.dtype:
        raise NotYet(f"{where} is {mine.dtype}, and the shards are {expected.dtype}: merging computes nothing")
    if mine.shape == expected.shape and torch.equal(mine, expected):
        return
    for words, candidate in _mistakes(expected, name, shards, ranks):
        if candidate.shape == mine.shape and torch.equal(candidate, mine):
            raise NotYet(f"{where} {words}")
    if mine.shape != expected.shape:
        raise NotYet(f"{where} has the shape {tuple(mine.shape)}, and should have {tuple(expected.shape)}")
    if torch.allclose(mine, expected, rtol=1e-5, atol=1e-7):
        raise NotYet(f"{where} is equal within rounding only: cut and concatenate, and compute nothing")
    if torch.equal(mine.flatten().sort().values, expected.flatten().sort().values):
        raise NotYet(f"{where} holds the right numbers in another order")
    raise NotYet(f"{where} has other numbers than the model that was split")


def _mistakes(expected: torch.Tensor, name: str, shards: list[Tensors], ranks: int) -> list[tuple[str, torch.Tensor]]:
    """(words, the tensor that a known mistake gives) for one tensor of the Hugging Face model."""
    if "embed_tokens" in name or "lm_head" in name:
        names = ["embedding.word_embeddings.weight", "output_layer.weight"]
        local, other = ([s[n] for s in shards] for n in (names if "embed" in name else names[::-1]))
        return [
            (
                "still has the padding: Megatron pads the vocabulary so that it divides. The first config.vocab_size rows count",
                torch.cat(local),
            ),
            (
                "has lost rows: the padding stands at the end of the whole vocabulary, and in no other place",
                torch.cat([t[: WIDTHS.vocab // ranks] for t in local]),
            ),
            ("is the part of one rank: the vocabulary is cut by rows, over all ranks", local[0][: WIDTHS.vocab]),
            ("has its ranks in the wrong order", torch.cat(local[::-1])[: WIDTHS.vocab]),
            (
                "is the other end of the model: this one's embedding and output layer are not tied",
                torch.cat(other)[: WIDTHS.vocab],
            ),
        ]
    if "norm" in name:
        return [
            ("stands whole on each rank: take one, do not concatenate", torch.cat([expected] * ranks)),
            ("stands whole on each rank: take one, do not add them up", sum([expected] * ranks)),
        ]
    layer = name.split(".")[2]
    part = f"decoder.layers.{layer}.{'self_attention.linear_' if 'self_attn' in name else 'mlp.linear_'}"
    if "o_proj" in name or "down_proj" in name:
        local = [s[part + ("proj.weight" if "o_proj" in name else "fc2.weight")] for s in shards]
        return [
            (
                "is row-parallel: each rank has some of its columns (dimension 1), so they stand side by side",
                torch.cat(local),
            ),
            ("is row-parallel: each rank has some of its columns, whole, and nothing is added up", sum(local)),
            ("has its ranks in the wrong order", torch.cat(local[::-1], 1)),
        ]
    if "gate" in name or "up_proj" in name:
        local = [s[part + "fc1.weight"] for s in shards]
        whole = torch.cat(local)
        first, second = whole.chunk(2)
        swapped = torch.cat([t.chunk(2)[0 if "up" in name else 1] for t in local])
        return [
            (
                "comes from the ranks' fc1 put together and cut in two: each rank has its own gate above its own up, so cut first, then put together",
                first if "gate" in name else second,
            ),
            ("is the other one: gate stands above up", swapped),
            (
                "is every second row: gate stands above up, they do not alternate",
                whole[0 if "gate" in name else 1 :: 2],
            ),
        ]
    return _qkv_mistakes(name, [s[part + "qkv.weight"] for s in shards], ranks)


def _qkv_mistakes(name: str, local: list[torch.Tensor], ranks: int) -> list[tuple[str, torch.Tensor]]:
    heads, groups, dim = WIDTHS.heads, WIDTHS.kv_heads, WIDTHS.hidden // WIDTHS.heads
    which, each = "qkv".index(name.split(".")[4][0]), heads // groups
    whole = torch.cat(local)
    sizes = [heads * dim, groups * dim, groups * dim]
    grouped = whole.view(groups, each + 2, dim, -1)
    right = [grouped[:, :each].flatten(0, 2), grouped[:, each].flatten(0, 1), grouped[:, each + 1].flatten(0, 1)]
    reverse = torch.cat(local[::-1]).view(groups, each + 2, dim, -1)
    told = [
        (
            "reads linear_qkv as all q, all k, all v one below the other: it is cut into query groups, each with its q heads, "
            "then its k, then its v",
            whole.split(sizes)[which],
        ),
        (
            "reads each rank's linear_qkv as all q, all k, all v one below the other: it is cut into query groups, each with its "
            "q heads, then its k, then its v",
            torch.cat([t.split([s // ranks for s in sizes])[which] for t in local]),
        ),
        (
            "has its ranks in the wrong order",
            [reverse[:, :each].flatten(0, 2), reverse[:, each].flatten(0, 1), reverse[:, each + 1].flatten(0, 1)][
                which
            ],
        ),
    ]
    told += [
        (f"is {'qkv'[other]}: in a query group stand q, then k, then v", right[other])
        for other in range(3)
        if other != which
    ]
    if which == 0:
        told.append(
            (
                "is the q heads of the groups in turns: a group's heads stay together",
                grouped[:, :each].transpose(0, 1).flatten(0, 2),
            )
        )
    return told
