"""The part of a model's configuration that decides how its tensors are split, and for which grids of ranks they can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.validation import check_counts

PAD_TO = 128  # Megatron's --make-vocab-size-divisible-by, for each tensor-parallel rank


@dataclass(frozen=True)
class Architecture:
    """The sizes of a Llama, Qwen2 or Qwen3, and which of its optional tensors it has.

    ``qkv_bias`` stands on q, k and v, ``output_bias`` on the attention's output projection, ``mlp_bias`` on all three
    matrices of the MLP; ``qk_norm`` is Qwen3's RMSNorm over the width of one head; ``tied`` embeddings are the output
    layer too.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """Read ``model.config``, or a table with the same keys. Raises ValueError for any other kind of model."""
        get = config.get if isinstance(config, Mapping) else lambda key, default=None: getattr(config, key, default)
        kind = get("model_type")
        if kind not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"A model of type {kind!r} is not one that is converted here: llama, qwen2 and qwen3 are.")
        sizes = {
            "layers": get("num_hidden_layers"),
            "hidden": get("hidden_size"),
            "heads": get("num_attention_heads"),
            "kv_heads": get("num_key_value_heads") or get("num_attention_heads"),
            "intermediate": get("intermediate_size"),
            "vocab": get("vocab_size"),
        }
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(
                    f"The configuration's number of {name} is {size!r}: that is no configuration of a model."
                )
        if sizes["heads"] % sizes["kv_heads"]:
            raise ValueError(f"{sizes['heads']} heads are no multiple of {sizes['kv_heads']} key/value heads.")
        attention_bias = bool(get("attention_bias", False)) and kind != "qwen2"
        return cls(
            kind=kind,
            **sizes,
            head_dim=get("head_dim") or sizes["hidden"] // sizes["heads"],
            tied=bool(get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=kind == "llama" and bool(get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
        )

    def padded_vocab(self, tp: int) -> int:
        """Return the rows of the embedding as Megatron pads them: the next multiple of 128 * tp."""
        return -(-self.vocab // (PAD_TO * tp)) * PAD_TO * tp

    def check_grid(self, tp: int, pp: int, *, padded: bool = False) -> None:
        """Raise ValueError, with the sizes that would do, if ``tp`` ranks or ``pp`` stages do not divide the model.

        A ``padded`` vocabulary always divides. More ranks than key/value heads are refused too: a head that is copied
        to several ranks must be kept equal during training, and the shards do not say whether it was.
        """
        check_counts(tp=tp, pp=pp)
        parts = {
            "attention heads": self.heads,
            "key/value heads (each rank needs whole ones of its own)": self.kv_heads,
            "columns of the MLP": self.intermediate,
        }
        if not padded:
            parts["rows of the vocabulary (layout megatron can pad it)"] = self.vocab
        for what, size in parts.items():
            if size % tp:
                fits = [n for n in range(1, self.kv_heads + 1) if not any(s % n for s in parts.values())]
                raise ValueError(f"tp={tp} does not divide the model's {size:,} {what}: it may be {_either(fits)}.")
        if self.layers % pp:
            fits = [n for n in range(1, self.layers + 1) if self.layers % n == 0]
            raise ValueError(f"pp={pp} does not divide the model's {self.layers} layers: it may be {_either(fits)}.")


def _either(numbers: list[int]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))
