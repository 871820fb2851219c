"""What each shard is made of: for every tensor in it, which tensors of the Hugging Face model, and how they are split.

Column-parallel matrices (q, k, v, gate, up) and the vocabulary are split by rows, because PyTorch stores a linear layer as
[out, in]; row-parallel ones (o, down) by columns. Norms, and biases that are added after the sum, are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from course_lib.validation import pick
from course_tools.conversion.architecture import EMBEDDING, NORM, OUTPUT, Architecture

# Of Megatron's layouts: its embedding, last norm and output layer, and each tensor of a layer by those that it fuses.
MEGATRON_ENDS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
MEGATRON_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
for _kind in ("weight", "bias"):
    MEGATRON_LAYER |= {
        f"self_attention.linear_qkv.{_kind}": tuple(f"self_attn.{name}_proj.{_kind}" for name in "qkv"),
        f"self_attention.linear_proj.{_kind}": (f"self_attn.o_proj.{_kind}",),
        f"mlp.linear_fc1.{_kind}": (f"mlp.gate_proj.{_kind}", f"mlp.up_proj.{_kind}"),
        f"mlp.linear_fc2.{_kind}": (f"mlp.down_proj.{_kind}",),
    }
# With Transformer Engine's layers, which are Megatron's default, a norm belongs to the linear layer that follows it.
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
LAYOUTS = ("hugging_face", "megatron", "megatron_local")  # the last for Megatron's --transformer-impl local


@dataclass(frozen=True)
class Piece:
    """One tensor of a shard."""

    name: str
    sources: tuple[str, ...]  # the Hugging Face tensors that it is made of: one, or those that are fused
    shapes: tuple[tuple[int, ...], ...]  # of each source, whole; a padded vocabulary counts its padding
    cut: Literal["rows", "columns", "whole"]  # what a tensor-parallel rank gets of each source
    groups: int = 1  # on one rank a fused tensor is this many groups, each with a share of every source in turn
    rows: int = 0  # of the first source without padding

    def shape(self, tp: int) -> tuple[int, ...]:
        """On one rank."""
        first, *rest = self.shapes[0]
        if self.cut == "columns":
            return (first, rest[0] // tp)
        return (sum(s[0] for s in self.shapes) // (tp if self.cut == "rows" else 1), *rest)


def pieces(a: Architecture, *, tp: int, pp: int, layout: str, vocab_rows: int | None = None) -> list[list[Piece]]:
    """Return the tensors of each pipeline stage; every tensor-parallel rank of a stage has the same ones.

    With tied embeddings the first stage has the matrix and the last stage, if it is another one, a copy of it as its
    output layer, which it needs to compute logits.

    ``vocab_rows`` is the size of a vocabulary that Megatron padded to something else than a multiple of 128 * tp.
    Raises ValueError for a grid that does not divide the model, or another layout.
    """
    pick("layout", layout, LAYOUTS)
    padded = layout != "hugging_face"
    a.check_grid(tp, pp, padded=padded)
    embedding, norm, output = MEGATRON_ENDS if padded else (EMBEDDING, NORM, OUTPUT)
    rows = (vocab_rows or a.padded_vocab(tp)) if padded else a.vocab
    vocabulary = {"shapes": ((rows, *a.tensors[NORM]),), "cut": "rows", "rows": a.vocab}
    per_stage = a.layers // pp
    stages: list[list[Piece]] = []
    for stage in range(pp):
        found = [Piece(embedding, (EMBEDDING,), **vocabulary)] if stage == 0 else []
        for local in range(per_stage):  # a stage counts its own layers from 0, in every layout
            found += _layer(a, tp, layout, local, stage * per_stage + local)
        if stage == pp - 1:
            found.append(Piece(norm, (NORM,), (a.tensors[NORM],), "whole"))
            if not a.tied or pp > 1:
                found.append(Piece(output, (EMBEDDING if a.tied else OUTPUT,), **vocabulary))
        stages.append(found)
    return stages


def _layer(a: Architecture, tp: int, layout: str, local: int, index: int) -> Iterator[Piece]:
    """Yield the tensors of one layer.

    Megatron's linear_qkv is [query groups, (heads a group + 2) * head_dim, hidden]: q … q k v of the first group, then of
    the next (megatron/core/transformer/attention.py, get_query_key_value_tensors), so that cutting it by rows gives each
    rank whole groups. linear_fc1 is each rank's gate above its up (megatron/core/transformer/mlp.py chunks it in two).
    """
    whole = f"model.layers.{index}."
    if layout == "hugging_face":
        here, names = f"model.layers.{local}.", {name: (name,) for name in a.layer}
    else:
        here, names = f"decoder.layers.{local}.", MEGATRON_LAYER
    for name, sources in names.items():
        if sources[0] not in a.layer:  # a bias or a norm that this model does without
            continue
        if layout == "megatron":
            name = FUSED_NORMS.get(name, name)
        yield Piece(
            here + name,
            tuple(whole + source for source in sources),
            tuple(a.layer[source] for source in sources),
            _cut(sources[0]),
            groups=a.kv_heads // tp if len(sources) == 3 else 1,
        )


def _cut(name: str) -> Literal["rows", "columns", "whole"]:
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return "columns"
    # a row-parallel layer adds its bias once, after the all-reduce, so every rank has all of it
    return "whole" if name.endswith(("norm.weight", "o_proj.bias", "down_proj.bias")) else "rows"
