"""One pipeline stage of a Hugging Face Llama: some of its blocks, and at the ends the embedding or the output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def stage_layers(layers: int, stages: int) -> list[list[int]]:
    """Numbers of the blocks of each stage, in order; where they do not divide, the first stages get one more.

    Raises:
        ValueError: more stages than blocks, or none.
    """
    if stages < 1:
        raise ValueError(f"{stages} pipeline stages: give a whole number of at least 1.")
    if layers < stages:
        raise ValueError(f"layers={layers} does not fill {stages} pipeline stages: take at most {layers} of them.")
    share, more = divmod(layers, stages)
    first = [i * share + min(i, more) for i in range(stages + 1)]
    return [list(range(a, b)) for a, b in zip(first, first[1:], strict=False)]


class Stage(nn.Module):
    """Blocks `numbers` of a Llama; they are the model's own, not copies, under the model's own names and numbers.

    The first stage takes token ids (batch, tokens), the others hidden states (batch, tokens, hidden). The last one gives
    logits (batch, tokens, vocabulary), the others hidden states.
    """

    def __init__(self, model: Any, numbers: list[int]) -> None:
        super().__init__()
        whole = model.model
        self.config = model.config
        self.embed_tokens = whole.embed_tokens if numbers[0] == 0 else None
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in numbers})
        last = numbers[-1] == len(whole.layers) - 1
        self.norm = whole.norm if last else None
        self.lm_head = model.lm_head if last else None
        self.rotary_emb = whole.rotary_emb  # no weights: every stage turns queries and keys by itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = self.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers.values():
            x = layer(x, position_embeddings=positions)  # without a mask, attention is causal
        return x if self.lm_head is None else self.lm_head(self.norm(x))
