"""The widths of a decoder-only language model: all that its memory and its arithmetic depend on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from course_lib.validation import check_counts


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
        qk_norm: a norm over each head's queries and keys (Qwen3).
        norm_bias: LayerNorm, with a bias, in the place of RMSNorm.
        positions: length of a learned table of positions; 0: rotary positions, no parameters.
        name: for tables and messages.
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
    norm_bias: bool = False
    positions: int = 0
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
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}: each group needs as many."
            )
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def __hash__(self) -> int:  # worked out once: estimate looks things up by shape many thousand times
        return self._hash

    @property
    def attention_width(self) -> int:
        """heads x head_dim: the width of queries and of o_proj's input; not always `hidden`."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def block_matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of one block, (out, in): q, k, v, o, then g(ate), u(p), d(own); without a gate u and d."""
        h, a, k, m = self.hidden, self.attention_width, self.kv_width, self.intermediate
        gate = {"g": (m, h)} if self.gated else {}
        return {"q": (a, h), "k": (k, h), "v": (k, h), "o": (h, a), **gate, "u": (m, h), "d": (h, m)}

    @property
    def block_vectors(self) -> list[int]:
        """Numbers of elements of one block's norms and biases, one entry a tensor."""
        h, a, k, m = self.hidden, self.attention_width, self.kv_width, self.intermediate
        norms = [h, h] * (2 if self.norm_bias else 1) + ([self.head_dim] * 2 if self.qk_norm else [])
        attention = ([a, k, k] if self.attention_bias else []) + ([h] if self.out_bias else [])
        return norms + attention + (([m] if self.gated else []) + [m, h] if self.mlp_bias else [])

    @property
    def block_parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.block_matrices.values()) + sum(self.block_vectors)

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
        return self.layers * self.block_parameters + self.embedding_parameters + self.head_parameters + final_norm


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048, name: str = "a GPT") -> Shape:
    """The GPT of the Megatron papers: LayerNorm, biases everywhere, MLP of 4 x hidden, learned positions, tied.

    Its count is equation 2 of arXiv:2104.04473, 12 l h^2 (1 + 13/12h + (V + s)/12lh), plus the last norm's 2h.
    """
    return Shape(
        layers,
        hidden,
        heads,
        vocab,
        gated=False,
        tied=True,
        attention_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm_bias=True,
        positions=positions,
        name=name,
    )
