"""What each shard is made of: for every tensor in it, which tensors of the Hugging Face model, and how they are split.

Column-parallel matrices (q, k, v, gate, up) and the vocabulary are split by rows, because PyTorch stores a linear layer as
[out, in]; row-parallel ones (o, down) by columns. Norms, and biases that are added after the sum, are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from course_tools.conversion.architecture import Architecture

# Of each layout: the names of the embedding, the last norm and the output layer.
ENDS = {
    "hugging_face": ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    "megatron": ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"),
}
LAYOUTS = tuple(ENDS)


@dataclass(frozen=True)
class Piece:
    """One tensor of a shard.

    Attributes:
        name: in the shard.
        sources: the Hugging Face tensors that it is made of: one, or those that are fused.
        shapes: of each source, whole; a padded vocabulary counts its padding.
        cut: what a tensor-parallel rank gets of each source.
        groups: on one rank a fused tensor is this many groups, each with a share of every source in turn.
        rows: of the first source without padding.
    """

    name: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    cut: Literal["rows", "columns", "whole"]
    groups: int = 1
    rows: int = 0

    def shape(self, tp: int) -> tuple[int, ...]:
        """On one rank."""
        first, *rest = self.shapes[0]
        if self.cut == "columns":
            return (first, rest[0] // tp)
        return (sum(s[0] for s in self.shapes) // (tp if self.cut == "rows" else 1), *rest)


def pieces(
    architecture: Architecture, *, tp: int, pp: int, layout: str = "hugging_face", vocab_rows: int | None = None
) -> list[list[Piece]]:
    """Return the tensors of each pipeline stage; every tensor-parallel rank of a stage has the same ones.

    With tied embeddings the first stage has the matrix and the last stage, if it is another one, a copy of it as its
    output layer, which it needs to compute logits.

    ``vocab_rows`` is the size of a padded vocabulary. Raises ValueError for a grid that does not divide the model, or
    another layout.
    """
    embedding, norm, output = ends(layout)
    architecture.check_grid(tp, pp, padded=vocab_rows is not None)
    one_layer = _hugging_face_layer if layout == "hugging_face" else _megatron_layer
    rows = vocab_rows or architecture.vocab
    vocabulary = {"shapes": ((rows, architecture.hidden),), "cut": "rows", "rows": architecture.vocab}
    layers_per_stage = architecture.layers // pp
    stages: list[list[Piece]] = []
    for stage in range(pp):
        found = []
        if stage == 0:
            found.append(Piece(embedding, ("model.embed_tokens.weight",), **vocabulary))
        for local in range(layers_per_stage):  # a stage counts its own layers from 0, in both layouts
            found += one_layer(architecture, tp, local, stage * layers_per_stage + local)
        if stage == pp - 1:
            found.append(Piece(norm, ("model.norm.weight",), ((architecture.hidden,),), "whole"))
            if not architecture.tied:
                found.append(Piece(output, ("lm_head.weight",), **vocabulary))
            elif pp > 1:
                found.append(Piece(output, ("model.embed_tokens.weight",), **vocabulary))
        stages.append(found)
    return stages


def ends(layout: str) -> tuple[str, str, str]:
    """Return the names of embedding, last norm and output layer. Raises ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}.")
    return ENDS[layout]


def _linears(a: Architecture) -> dict[str, tuple[tuple[int, int], str, bool]]:
    """Return, per linear layer of a block, its shape [out, in], its cut, and whether it has a bias."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return {
        "self_attn.q_proj": ((q, a.hidden), "rows", a.qkv_bias),
        "self_attn.k_proj": ((kv, a.hidden), "rows", a.qkv_bias),
        "self_attn.v_proj": ((kv, a.hidden), "rows", a.qkv_bias),
        "self_attn.o_proj": ((a.hidden, q), "columns", a.output_bias),
        "mlp.gate_proj": ((a.intermediate, a.hidden), "rows", a.mlp_bias),
        "mlp.up_proj": ((a.intermediate, a.hidden), "rows", a.mlp_bias),
        "mlp.down_proj": ((a.hidden, a.intermediate), "columns", a.mlp_bias),
    }


def _norms(a: Architecture) -> dict[str, int]:
    found = {"input_layernorm": a.hidden, "post_attention_layernorm": a.hidden}
    return found | ({"self_attn.q_norm": a.head_dim, "self_attn.k_norm": a.head_dim} if a.qk_norm else {})


def _fused(
    a: Architecture, name: str, sources: tuple[str, ...], *, local: str, whole: str, groups: int = 1
) -> Iterator[Piece]:
    """Yield the weight of one or several fused linear layers, and the bias if they have one."""
    linears = [_linears(a)[source] for source in sources]
    shapes, cut, bias = tuple(shape for shape, _, _ in linears), linears[0][1], linears[0][2]
    yield Piece(f"{local}.{name}.weight", tuple(f"{whole}.{s}.weight" for s in sources), shapes, cut, groups)
    if bias:
        # a row-parallel layer adds its bias once, after the all-reduce, so every rank has all of it
        cut = "rows" if cut == "rows" else "whole"
        flat = tuple(shape[:1] for shape in shapes)
        yield Piece(f"{local}.{name}.bias", tuple(f"{whole}.{s}.bias" for s in sources), flat, cut, groups)


def _hugging_face_layer(a: Architecture, tp: int, local: int, index: int) -> Iterator[Piece]:
    here, whole = f"model.layers.{local}", f"model.layers.{index}"
    for name, width in _norms(a).items():
        yield Piece(f"{here}.{name}.weight", (f"{whole}.{name}.weight",), ((width,),), "whole")
    for name in _linears(a):
        yield from _fused(a, name, (name,), local=here, whole=whole)


def _megatron_layer(a: Architecture, tp: int, local: int, index: int) -> Iterator[Piece]:
    """Megatron-core's names with Transformer Engine's layers, where a norm belongs to the linear layer that follows it.

    linear_qkv is [query groups, (heads a group + 2) * head_dim, hidden]: q … q k v of the first group, then of the next
    (megatron/core/transformer/attention.py, get_query_key_value_tensors), so that cutting it by rows gives each rank whole
    groups. linear_fc1 is each rank's gate above its up (megatron/core/transformer/mlp.py chunks it in two).
    """
    here, whole = f"decoder.layers.{local}", f"model.layers.{index}"
    norms = {
        "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
        "post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight",
        "self_attn.q_norm": "self_attention.q_layernorm.weight",
        "self_attn.k_norm": "self_attention.k_layernorm.weight",
    }
    for name, width in _norms(a).items():
        yield Piece(f"{here}.{norms[name]}", (f"{whole}.{name}.weight",), ((width,),), "whole")
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    for name, sources, groups in (
        ("self_attention.linear_qkv", qkv, a.kv_heads // tp),
        ("self_attention.linear_proj", ("self_attn.o_proj",), 1),
        ("mlp.linear_fc1", gate_up, 1),
        ("mlp.linear_fc2", ("mlp.down_proj",), 1),
    ):
        yield from _fused(a, name, sources, local=here, whole=whole, groups=groups)
