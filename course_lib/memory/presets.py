"""Widths of well-known models, as their published configuration files give them."""

from __future__ import annotations

from course_lib.memory.shapes import Shape, gpt

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


def _all() -> dict[str, Shape]:
    found = {}
    for table, extra in (
        (_LLAMA, {}),
        (_QWEN2, {"attention_bias": True}),
        (_QWEN3, {"qk_norm": True, "head_dim": 128}),
    ):
        for name, (layers, hidden, heads, kv_heads, intermediate, vocab, tied) in table.items():
            found[name] = Shape(
                layers,
                hidden,
                heads,
                vocab,
                kv_heads=kv_heads,
                intermediate=intermediate,
                tied=tied,
                name=name,
                **extra,
            )
    for name, (layers, hidden, heads) in _MEGATRON.items():
        found[name] = gpt(layers, hidden, heads, name=name)
    found["gpt2"] = gpt(12, 768, 12, 50257, 1024, "gpt2")
    found["gpt2-xl"] = gpt(48, 1600, 25, 50257, 1024, "gpt2-xl")
    found["tiny"] = Shape(4, 128, 4, 256, kv_heads=2, intermediate=352, name="tiny")  # course_lib.models.tiny_llama
    return found


PRESETS: dict[str, Shape] = _all()
