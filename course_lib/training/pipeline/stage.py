"""One pipeline stage of the tiny Llama: the layers that it holds and what it computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def split_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage, in order; where they do not divide, the first stages get one more.

    The last stage has the output head besides, the first only looks tokens up. Raises ValueError where a stage would get
    no layer.
    """
    if stages < 1:
        raise ValueError(f"{stages} pipeline stages: give a whole number of at least 1.")
    if layers < stages:
        raise ValueError(f"layers={layers} are fewer than the {stages} stages: take at least one layer a stage.")
    share, more = divmod(layers, stages)
    starts = [stage * share + min(stage, more) for stage in range(stages + 1)]
    return [range(first, last) for first, last in zip(starts, starts[1:], strict=False)]


class LlamaStage(torch.nn.Module):
    """One stage: tokens (batch, seq_len) or hidden states (batch, seq_len, hidden) in; hidden states or logits out.

    Args:
        model: a whole LlamaForCausalLM; only this stage's modules are kept, under their own names.
        layers: the stage's. With the first comes the embedding, with the last the final norm and the output head.
    """

    def __init__(self, model: Any, layers: range) -> None:
        super().__init__()
        inner = model.model
        last = layers[-1] == len(inner.layers) - 1
        self.config = model.config
        self.embed_tokens = inner.embed_tokens if layers[0] == 0 else None
        self.rotary_emb = inner.rotary_emb  # no parameters: every stage has its own
        self.layers = torch.nn.ModuleDict({str(i): inner.layers[i] for i in layers})
        self.norm = inner.norm if last else None
        self.lm_head = model.lm_head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        rotary = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers.values():  # without a mask the attention is causal
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each next token: logits (batch, seq_len, vocab), tokens (batch, seq_len)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
