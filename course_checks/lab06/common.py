"""What the checks of lab 6 share: the lab itself, FSDP2's rule for rows, and a tied Llama."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from course_checks.harness import Lab

lab = Lab("06_fsdp", title="FSDP")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def chunk_rows(rows: int, ranks: int, rank: int) -> range:
    """Rows of dimension 0 that `rank` keeps, by the rule of torch.chunk, which fully_shard follows."""
    each = -(-rows // ranks)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def rows_bytes(model: nn.Module, ranks: int, rank: int) -> int:
    """Bytes of the rows that `rank` keeps of a whole model's parameters, in their dtype."""
    rows = {p: len(chunk_rows(len(p), ranks, rank)) for p in model.parameters()}
    return sum(p.nbytes // len(p) * kept for p, kept in rows.items())


def tied_llama(layers: int, vocab: int, hidden: int = 40, intermediate: int = 52, seed: int = 0) -> LlamaForCausalLM:
    """A Llama in fp32 whose embedding is its head, on the device of `with torch.device(…)`; few rows divide by 2 and 3."""
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    rope = {"rope_type": "default", "rope_theta": 500_000.0}  # not the default
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=rope
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)
