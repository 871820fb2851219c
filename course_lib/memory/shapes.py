"""The widths of a decoder-only language model: all that its memory and its arithmetic depend on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from course_lib.validation import check_counts


class Experts(NamedTuple):
    """The mixture of experts that takes the MLP's place in most blocks.

    Attributes:
        number, active: experts of a block, and how many of them a token goes through.
        intermediate: width of one expert. shared: width of the expert that all tokens go through; 0 for none.
        bias: biases in the router and in every expert (gpt-oss).
        dense: numbers of the blocks that have a plain MLP all the same, counted from 0.
        rows: copies of each token that the experts compute; 0: `active`; all of them in Llama 4, as transformers runs it.
        wide_router: the router computes in fp32 (DeepSeek). wide_shares: its shares are in fp32 (Mixtral, DeepSeek).
    """

    number: int
    active: int
    intermediate: int
    shared: int = 0
    bias: bool = False
    dense: tuple[int, ...] = ()
    rows: int = 0
    wide_router: bool = False
    wide_shares: bool = False


class Latent(NamedTuple):
    """Multi-head latent attention (DeepSeek): queries, keys and values come out of narrow latents.

    Attributes:
        q_rank, kv_rank: widths of the latents; q_rank 0: queries are computed at once.
        rope: features a head that turn with the position, contained in the shape's head_dim. value: features a value.
    """

    q_rank: int
    kv_rank: int
    rope: int
    value: int


class Block(NamedTuple):
    """Parameters of one block: matrices (out, in) by name, elements of each vector, experts (number, out, in)."""

    matrices: dict[str, tuple[int, int]]
    vectors: list[int]
    experts: dict[str, tuple[int, int, int]]

    @property
    def parameters(self) -> int:
        matrices = sum(rows * columns for rows, columns in self.matrices.values())
        return matrices + sum(self.vectors) + sum(n * rows * columns for n, rows, columns in self.experts.values())


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer.

    Attributes:
        layers, hidden, heads, vocab: numbers of blocks, of features, of attention heads, of tokens.
        kv_heads: heads of keys and values; fewer than `heads` is grouped-query attention. 0: as many as `heads`.
        head_dim: features a head. 0: hidden / heads.
        intermediate: width of the MLP. 0: 4 x hidden.
        gated: SwiGLU, three matrices in the MLP; otherwise two.
        tied: the output layer is the embedding's matrix.
        attention_bias, mlp_bias: biases of q, k, v (`out_bias` for o) and of the MLP.
        qk_norm: a norm over each head's queries and keys (Qwen3); `wide_qk_norm`: over those of all heads (OLMo 2).
        norm_bias: LayerNorm, with a bias, in the place of RMSNorm.
        norms: where a block has them, "before" attention and MLP, "behind" (OLMo 2) or "both" (Gemma 2 and 3, GLM-4).
        wide_norms: norms multiply by their weights in fp32, before they cast down (Gemma, OLMo 2, gpt-oss).
        fused: queries, keys and values are one matrix, gate and up another ("qkv", "gate"): LoRA sees those.
        gelu_in_parts: the activation is written out, a tensor an operation (GPT-2 in transformers).
        sinks: each head has a number that its softmax may lean on (gpt-oss).
        softcap: logits and attention's scores go through a tanh (Gemma 2).
        positions: length of a learned table of positions; 0: rotary positions, no parameters.
        experts, latent: of a mixture of experts; of DeepSeek's attention.
        kind: transformers' model_type; "" for widths alone. name: for tables and messages.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    gated: bool = True
    tied: bool = False
    attention_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    norm_bias: bool = False
    norms: str = "before"
    wide_norms: bool = False
    fused: tuple[str, ...] = ()
    gelu_in_parts: bool = False
    sinks: bool = False
    softcap: bool = False
    positions: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    kind: str = ""
    name: str = "a model"

    def __post_init__(self) -> None:
        check_counts(layers=self.layers, hidden=self.hidden, heads=self.heads, vocab=self.vocab)
        for field, default in (
            ("kv_heads", self.heads),
            ("head_dim", self.hidden // self.heads),
            ("intermediate", 4 * self.hidden),
        ):
            value = getattr(self, field)
            if type(value) is not int or value < 0:
                raise ValueError(f"{field}={value!r}: give a whole number, or 0 for the usual one.")
            if not value:
                object.__setattr__(self, field, default)
        if self.head_dim * self.heads != self.hidden and self.head_dim == self.hidden // self.heads:
            raise ValueError(
                f"hidden={self.hidden} does not split into heads={self.heads}: give another number of heads."
            )
        for field, kind in (("experts", Experts), ("latent", Latent), ("fused", tuple), ("norms", str)):
            value = getattr(self, field)
            if not isinstance(value, kind) and value is not None:
                raise ValueError(f"{field}={value!r}: widths alone do not say it; give a config.json.")
        if self.experts and not 0 < self.experts.active <= self.experts.number:
            raise ValueError(f"{self.experts.active} of {self.experts.number} experts cannot be active.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}: each group needs as many."
            )
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def __hash__(self) -> int:  # worked out once: estimate looks things up by shape many thousand times
        return self._hash

    @property
    def attention_width(self) -> int:
        """heads x head_dim: the width of queries; not always `hidden`."""
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """The width of o_proj's input."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_matrices(self) -> dict[str, tuple[int, int]]:
        """(out, in) by name: q, k, v, o; qkv where those are one; with latents the two halves of each."""
        h, a, k, v = self.hidden, self.attention_width, self.kv_width, self.value_width
        if "qkv" in self.fused:
            return {"qkv": (a + 2 * k, h), "o": (h, v)}
        if not self.latent:
            return {"q": (a, h), "k": (k, h), "v": (k, h), "o": (h, v)}
        q_rank, kv_rank, rope, value = self.latent
        queries = {"qa": (q_rank, h), "qb": (a, q_rank)} if q_rank else {"q": (a, h)}
        up = self.heads * (self.head_dim - rope + value)
        return queries | {"kva": (kv_rank + rope, h), "kvb": (up, kv_rank), "o": (h, v)}

    @property
    def mlp_matrices(self) -> dict[str, tuple[int, int]]:
        """Of a plain MLP: g(ate), u(p), d(own); without a gate u and d."""
        h, m = self.hidden, self.intermediate
        if "gate" in self.fused:
            return {"g": (2 * m, h), "d": (h, m)}
        return ({"g": (m, h)} if self.gated else {}) | {"u": (m, h), "d": (h, m)}

    def block(self, layer: int = -1) -> Block:
        """The parameters of one block; of a mixture, which blocks are plain depends on the `layer`."""
        h, a, k, e = self.hidden, self.attention_width, self.kv_width, self.experts
        norms = [h] * (4 if self.norms == "both" else 2) * (2 if self.norm_bias else 1)
        norms += [self.head_dim] * 2 if self.qk_norm else [a, k] if self.wide_qk_norm else []
        if self.latent:
            norms += [rank for rank in (self.latent.q_rank, self.latent.kv_rank) if rank]
            biases = [self.latent.q_rank, self.latent.kv_rank + self.latent.rope] if self.attention_bias else []
        else:
            biases = [a, k, k] if self.attention_bias else []
        vectors = norms + biases + ([h] if self.out_bias else []) + ([self.heads] if self.sinks else [])
        if e is None or layer % self.layers in e.dense:
            m = self.intermediate
            mlp = (([m] if self.gated else []) + [m, h]) if self.mlp_bias else []
            return Block(self.attention_matrices | self.mlp_matrices, vectors + mlp, {})
        m, shared = e.intermediate, e.shared
        matrices = {"sg": (shared, h), "su": (shared, h), "sd": (h, shared)} if shared else {}
        biases = [e.number, e.number * 2 * m, e.number * h] if e.bias else []
        experts = {"router": (1, e.number, h), "gate_up": (e.number, 2 * m, h), "down": (e.number, h, m)}
        return Block(self.attention_matrices | matrices, vectors + biases, experts)

    @property
    def kinds(self) -> list[tuple[Block, int]]:
        """Each kind of block with how many layers are of it, mixtures of experts first."""
        dense = self.experts.dense if self.experts else ()
        if not dense:
            return [(self.block(), self.layers)]
        mixture = next(layer for layer in range(self.layers) if layer not in dense)
        return [(self.block(mixture), self.layers - len(dense)), (self.block(dense[0]), len(dense))]

    @property
    def block_parameters(self) -> int:
        """Of one block; of a mixture, whose blocks differ, the mean."""
        return sum(block.parameters * number for block, number in self.kinds) // self.layers

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the output layer; 0 where it is the embedding's matrix."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, a tied matrix once."""
        final_norm = self.hidden * (2 if self.norm_bias else 1)
        blocks = sum(block.parameters * number for block, number in self.kinds)
        return blocks + self.embedding_parameters + self.head_parameters + final_norm

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through: of a mixture, `active` experts a block."""
        e = self.experts
        if e is None:
            return self.parameters
        each = 3 * e.intermediate * self.hidden + (2 * e.intermediate + self.hidden) * e.bias
        return self.parameters - (self.layers - len(e.dense)) * (e.number - e.active) * each


def gpt(
    layers: int,
    hidden: int,
    heads: int,
    vocab: int = 51200,
    positions: int = 2048,
    name: str = "a GPT",
    intermediate: int = 0,
    tied: bool = True,
) -> Shape:
    """The GPT of the Megatron papers: LayerNorm, biases everywhere, MLP of 4 x hidden, learned positions, tied.

    Its count is equation 2 of arXiv:2104.04473, 12 l h^2 (1 + 13/12h + (V + s)/12lh), plus the last norm's 2h.
    """
    return Shape(
        layers,
        hidden,
        heads,
        vocab,
        intermediate=intermediate,
        gated=False,
        tied=tied,
        attention_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm_bias=True,
        positions=positions,
        name=name,
    )
