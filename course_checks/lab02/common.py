"""What the checks of lab 2 share: the lab itself, and a Llama in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from course_checks.harness import Lab, NotYet, returned
from course_lib.models import no_progress_bars
from course_lib.on_cpu.bitsandbytes import prepare_bitsandbytes

prepare_bitsandbytes()  # before PEFT imports it
lab = Lab("02_single_gpu", title="Stretching one GPU")


def tensor_like(value: Any, like: torch.Tensor, what: str) -> torch.Tensor:
    """`value` if it is a tensor of the shape and dtype of `like`. Raises NotYet otherwise."""
    returned(value, torch.Tensor, what)
    if value.shape != like.shape:
        raise NotYet(f"{what} has the shape {tuple(value.shape)}, and should have {tuple(like.shape)}")
    if value.dtype != like.dtype:
        raise NotYet(f"{what} is {str(value.dtype)[6:]}, and should be {str(like.dtype)[6:]}")
    return value


def write_llama(
    folder: Path,
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    vocab: int,
    seed: int,
    kv_heads: int = 2,
    scale: float = 1.0,
) -> None:
    """A Llama in fp32 with its embedding for a head; with a large `scale` of it, losses differ much from token to token."""
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 128}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.06, use_cache=False)
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        model.model.embed_tokens.weight.data *= scale
        model.save_pretrained(folder)
