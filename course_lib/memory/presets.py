"""The shapes of well-known models, as their published configuration files give them; and of any other model.

`shape_of` takes a preset's name, widths, or a transformers configuration or model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

from course_lib.memory.shapes import Shape, gpt
from course_lib.validation import did_you_mean

# name: layers, hidden, heads, kv_heads, intermediate, vocabulary, tied. Source: config.json of each model's repository on
# the Hugging Face hub (Meta's Llama, Alibaba's Qwen, Mistral AI, Hugging Face's SmolLM2).
_LLAMA = {
    "llama-7b": (32, 4096, 32, 32, 11008, 32000, False),
    "llama-13b": (40, 5120, 40, 40, 13824, 32000, False),
    "llama-33b": (60, 6656, 52, 52, 17920, 32000, False),
    "llama-65b": (80, 8192, 64, 64, 22016, 32000, False),
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000, False),
    "llama-2-13b": (40, 5120, 40, 40, 13824, 32000, False),
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000, False),
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256, False),
    "llama-3-70b": (80, 8192, 64, 8, 28672, 128256, False),
    "llama-3.1-8b": (32, 4096, 32, 8, 14336, 128256, False),
    "llama-3.1-70b": (80, 8192, 64, 8, 28672, 128256, False),
    "llama-3.1-405b": (126, 16384, 128, 8, 53248, 128256, False),
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256, True),
    "llama-3.2-3b": (28, 3072, 24, 8, 8192, 128256, True),
    "llama-3.3-70b": (80, 8192, 64, 8, 28672, 128256, False),
    "mistral-7b": (32, 4096, 32, 8, 14336, 32000, False),
    "tinyllama-1.1b": (22, 2048, 32, 4, 5632, 32000, False),
    "smollm2-135m": (30, 576, 9, 3, 1536, 49152, True),
    "smollm2-360m": (32, 960, 15, 5, 2560, 49152, True),
    "smollm2-1.7b": (24, 2048, 32, 32, 8192, 49152, True),
}
# Qwen2.5: as above, with biases on q, k and v
_QWEN2 = {
    "qwen2.5-0.5b": (24, 896, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": (36, 2048, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": (28, 3584, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": (48, 5120, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": (64, 5120, 40, 8, 27648, 152064, False),
    "qwen2.5-72b": (80, 8192, 64, 8, 29568, 152064, False),
}
# Qwen3: heads of 128 features whatever the hidden width, and a norm on queries and keys
_QWEN3 = {
    "qwen3-0.6b": (28, 1024, 16, 8, 3072, 151936, True),
    "qwen3-1.7b": (28, 2048, 16, 8, 6144, 151936, True),
    "qwen3-4b": (36, 2560, 32, 8, 9728, 151936, True),
    "qwen3-8b": (36, 4096, 32, 8, 12288, 151936, False),
    "qwen3-14b": (40, 5120, 40, 8, 17408, 151936, False),
    "qwen3-32b": (64, 5120, 64, 8, 25600, 151936, False),
}
# layers, hidden, heads: table 1 of arXiv:2104.04473 (GPT, vocabulary 51,200, length 2,048) and GPT-3 itself
_MEGATRON = {
    "megatron-1.7b": (24, 2304, 24),
    "megatron-3.6b": (30, 3072, 32),
    "megatron-7.5b": (36, 4096, 32),
    "megatron-18.4b": (40, 6144, 48),
    "megatron-39.1b": (48, 8192, 64),
    "megatron-76.1b": (60, 10240, 80),
    "megatron-145.6b": (80, 12288, 96),
    "megatron-310.1b": (96, 16384, 128),
    "megatron-529.6b": (105, 20480, 128),
    "megatron-1008b": (128, 25600, 160),
    "gpt3-175b": (96, 12288, 96),
}


# layers, hidden, heads, vocabulary, longest sequence
_GPT = {
    "gpt2": (12, 768, 12, 50257, 1024),
    "gpt2-xl": (48, 1600, 25, 50257, 1024),
    "korthikanti-22b": (48, 6144, 64, 51200, 2048),  # table 3 of arXiv:2205.05198
    # v1.0, a GPT-2 by its config.json on the hub; its vocabulary of 50,570 is padded to a multiple of 128, as trained
    "llm-jp-13b": (40, 5120, 40, 50688, 2048),
}
ALIASES = {
    "llm-jp-13b-v1.0": "llm-jp-13b",
    "gpt-3": "gpt3-175b",
    "gpt-3-175b": "gpt3-175b",
    "megatron-1t": "megatron-1008b",
    "gpt-1t": "megatron-1008b",
}


def _all() -> dict[str, Shape]:
    presets = {}
    extras: dict[str, dict[str, Any]] = {"qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": True, "head_dim": 128}}
    for family, table in (("llama", _LLAMA), ("qwen2", _QWEN2), ("qwen3", _QWEN3)):
        for name, (layers, hidden, heads, kv_heads, intermediate, vocab, tied) in table.items():
            widths = {"kv_heads": kv_heads, "intermediate": intermediate, "tied": tied} | extras.get(family, {})
            presets[name] = Shape(layers, hidden, heads, vocab, name=name, **widths)
    for name, widths in (_MEGATRON | _GPT).items():
        presets[name] = gpt(*widths, name=name)
    presets["tiny"] = Shape(4, 128, 4, 256, kv_heads=2, intermediate=352, name="tiny")  # course_lib.models.tiny_llama
    return presets


PRESETS: dict[str, Shape] = _all()


def shape_of(model: str | Shape | Mapping[str, Any] | Any) -> Shape:
    """The shape behind a preset's name, a mapping of :class:`Shape`'s fields, or a transformers configuration or model."""
    if isinstance(model, Shape):
        return model
    if isinstance(model, str):
        return _preset(model)
    if isinstance(model, Mapping):
        unknown = set(model) - {field.name for field in fields(Shape)}
        if unknown:
            near = did_you_mean(sorted(unknown)[0], [field.name for field in fields(Shape)], cutoff=0.6)
            raise ValueError(
                f"A shape has no {sorted(unknown)[0]!r}" + (f": did you mean {near[0]!r}?" if near else ".")
            )
        missing = [name for name in ("layers", "hidden", "heads", "vocab") if name not in model]
        if missing:
            raise ValueError(f"A shape needs layers, hidden, heads and vocab: {missing[0]} is missing.")
        return Shape(**model)
    config = getattr(model, "config", model)
    config = getattr(config, "text_config", None) or config  # the language model inside a multimodal one
    if not all(hasattr(config, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size")):
        raise ValueError(f"No model can be read from {type(model).__name__}: give a preset's name, a config or widths.")
    return _from_config(config)


def written_shape(text: str) -> Shape:
    """The shape behind what a command line says: a preset's name, or widths written as layers=2,hidden=64,…"""
    if "=" not in text:
        return shape_of(text)
    widths: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        flag = {"true": True, "false": False}.get(value.strip().lower())
        if flag is None and not value.strip().isdecimal():
            raise ValueError(f"--model {item.strip()}: give a width as name=number, or name=true for a property.")
        widths[name.strip()] = int(value) if flag is None else flag
    return shape_of(widths)


def _from_config(config: Any) -> Shape:
    kind = getattr(config, "model_type", "")
    if getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        raise ValueError(f"{kind} is a mixture of experts: the course's memory model knows dense models only.")
    if kind == "gpt2":
        return replace(
            gpt(
                config.num_hidden_layers,
                config.hidden_size,
                config.num_attention_heads,
                config.vocab_size,
                config.max_position_embeddings,
                "gpt2",
            ),
            tied=config.tie_word_embeddings,
        )
    if kind not in ("llama", "mistral", "qwen2", "qwen3", "smollm3"):
        raise ValueError(f"model_type {kind!r} is not known here: give its widths, as in estimate(dict(layers=…, …)).")
    bias = kind == "qwen2" or bool(getattr(config, "attention_bias", False))
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        vocab=config.vocab_size,
        kv_heads=getattr(config, "num_key_value_heads", None) or 0,
        head_dim=getattr(config, "head_dim", None) or 0,
        intermediate=config.intermediate_size,
        tied=bool(config.tie_word_embeddings),
        attention_bias=bias,
        out_bias=bias and kind != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=kind == "qwen3",
        name=getattr(config, "_name_or_path", "") or kind,
    )


@cache
def _preset(name: str) -> Shape:
    key = re.sub(r"[-_]?(instruct|base|hf|chat|it)$", "", name.strip().lower().rpartition("/")[2]).removeprefix("meta-")
    key = ALIASES.get(key, key)
    if key in PRESETS:
        return PRESETS[key]
    near = did_you_mean(key, PRESETS, most=3, cutoff=0.4) or ["llama-3.1-8b", "qwen3-0.6b"]
    raise ValueError(f"No model is called {name!r}: the nearest are {', '.join(near)}. A config or widths will do too.")
