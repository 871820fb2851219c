"""From a model's config.json, as transformers writes it, to its shape: which architectures are known, and what each has.

Every value that a file may leave out is filled in as transformers' own configuration class does. A test holds the number of
parameters of each architecture against the model that the installed transformers builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from course_lib.memory.shapes import Experts, Latent, Shape
from course_lib.validation import did_you_mean

_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
# What a file may leave out. Where a number of key-value heads is None there are as many as query heads.
LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "num_experts_per_tok": 2, "num_local_experts": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    "deepseek_v3": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "num_experts_per_tok": 4},
    "llama4_text": {"num_key_value_heads": 8, "interleave_moe_layer_step": 1, "moe_layers": None},
    "gemma": _GEMMA | {"num_key_value_heads": 16},
    "gemma2": _GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    "phi3": {"num_key_value_heads": None},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "olmo2": {"num_key_value_heads": None},
    "granite": {"num_key_value_heads": None},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "starcoder2": {"num_key_value_heads": 2, "tie_word_embeddings": True, "use_bias": True},
    "gpt2": {"tie_word_embeddings": True, "n_inner": None, "activation_function": "gelu_new"},
}
NAMES = {  # one thing, several names: GPT-2's, and those of the mixtures
    "num_hidden_layers": ("n_layer",),
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}
INSIDE = {"gemma3": "gemma3_text", "llama4": "llama4_text"}  # models of text and images, with the text's part inside


def block_class(kind: str) -> str | None:
    """The transformers class of a model's blocks; None for widths that are nobody's."""
    if kind not in LEFT_OUT:
        return None
    irregular = {"gemma3_text": "Gemma3DecoderLayer", "smollm3": "SmolLM3DecoderLayer", "gpt2": "GPT2Block"}
    return irregular.get(kind, "".join(word.capitalize() for word in kind.split("_")) + "DecoderLayer")


class _Config:
    """Values of one config.json, those left out filled in."""

    def __init__(self, values: Mapping[str, Any], kind: str) -> None:
        self.kind = kind
        self.values = LEFT_OUT[kind] | dict(values)

    def __getitem__(self, name: str) -> Any:
        for known in (name, *NAMES.get(name, ())):
            if known in self.values:
                return self.values[known]
        raise ValueError(f"This {self.kind} configuration has no {name}.")

    def flag(self, name: str) -> bool:
        return bool(self.values.get(name, False))


def read_config(values: Mapping[str, Any], name: str = "") -> Shape:
    """The shape that a configuration describes, of a model of text and images that of its language model.

    Args:
        values: the content of config.json. name: for tables and messages; the model's type where it is empty.

    Raises:
        ValueError: a model type that is not known here, or a width that is missing.
    """
    kind = str(values.get("model_type") or "")
    if kind in INSIDE:
        values, kind = values.get("text_config"), INSIDE[kind]
        if not isinstance(values, Mapping):
            raise ValueError("This configuration has no text_config, where its language model stands.")
    if kind not in LEFT_OUT:
        near = did_you_mean(kind, LEFT_OUT, most=3, cutoff=0.4) or list(LEFT_OUT)
        raise ValueError(
            f"model_type {kind!r} is not known here: the nearest are {', '.join(near)}; widths will do too."
        )
    try:
        return _shape(_Config(values, kind), kind, name)
    except TypeError as error:
        raise ValueError(f"This {kind} configuration has a width that is no number: {error}.") from None


def _shape(c: _Config, kind: str, name: str) -> Shape:
    heads, hidden, layers = c["num_attention_heads"], c["hidden_size"], c["num_hidden_layers"]
    bias = c.flag("attention_bias") and kind not in ("mistral", "mixtral", "phi3")
    all_biases = kind == "gpt2" or c.flag("use_bias")
    classic = kind in ("gpt2", "starcoder2")  # LayerNorm, and an MLP without a gate
    latent = _latent(c) if kind == "deepseek_v3" else None
    inner = "intermediate_size_mlp" if kind == "llama4_text" else "n_inner" if kind == "gpt2" else "intermediate_size"
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=c["vocab_size"],
        kv_heads=heads if kind == "gpt2" or latent else c["num_key_value_heads"] or heads,
        head_dim=c["qk_nope_head_dim"] + latent.rope if latent else c.values.get("head_dim") or hidden // heads,
        intermediate=c[inner] or 4 * hidden,
        gated=not classic,
        tied=c.flag("tie_word_embeddings"),
        attention_bias=kind == "qwen2" or bias or all_biases,
        out_bias=(bias and kind not in ("qwen2", "glm4")) or all_biases,
        mlp_bias=all_biases or (c.flag("mlp_bias") and kind in ("llama", "granite", "smollm3")),
        qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        wide_qk_norm=kind == "olmo2",
        norm_bias=classic,
        norms="behind" if kind == "olmo2" else "both" if kind in ("gemma2", "gemma3_text", "glm4") else "before",
        wide_norms=kind in ("gemma", "gemma2", "gemma3_text", "olmo2", "gpt_oss"),
        fused={"phi3": ("qkv", "gate"), "glm4": ("gate",), "gpt2": ("qkv",)}.get(kind, ()),
        gelu_in_parts=c.values.get("activation_function") == "gelu_new",
        sinks=kind == "gpt_oss",
        softcap=bool(c.values.get("final_logit_softcapping")),
        positions=c["max_position_embeddings"] if kind == "gpt2" else 0,
        experts=_experts(c, layers),
        latent=latent,
        kind=kind,
        name=name or kind,
    )


def _latent(c: _Config) -> Latent:
    return Latent(c["q_lora_rank"] or 0, c["kv_lora_rank"], c["qk_rope_head_dim"], c["v_head_dim"])


def _experts(c: _Config, layers: int) -> Experts | None:
    """The mixture of experts, by the rules of each architecture's configuration class."""
    if c.kind in ("mixtral", "gpt_oss"):
        both = {"bias": c.kind == "gpt_oss", "wide_shares": c.kind == "mixtral"}
        return Experts(c["experts"], c["num_experts_per_tok"], c["intermediate_size"], **both)
    if c.kind == "qwen3_moe":
        sparse = {i for i in range(layers) if (i + 1) % c["decoder_sparse_step"] == 0} - {*c["mlp_only_layers"]}
        width, shared, rows = c["moe_intermediate_size"], 0, 0
    elif c.kind == "deepseek_v3":
        sparse = {*range(c["first_k_dense_replace"], layers)}
        width, rows = c["moe_intermediate_size"], 0
        shared = width * c["n_shared_experts"]
    elif c.kind == "llama4_text":
        step = c["interleave_moe_layer_step"]
        sparse = {*(range(step - 1, layers, step) if c["moe_layers"] is None else c["moe_layers"])}
        width = shared = c["intermediate_size"]
        rows = c["experts"]
    else:
        return None
    if not sparse:
        return None
    dense = tuple(i for i in range(layers) if i not in sparse)
    wide = c.kind == "deepseek_v3"
    return Experts(c["experts"], c["num_experts_per_tok"], width, shared, False, dense, rows, wide, wide)
