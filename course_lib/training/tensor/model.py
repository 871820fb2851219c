"""A Llama over tensor-parallel ranks in plain PyTorch: heads, MLP and vocabulary are split, norms are replicated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.models.data import IGNORED
from course_lib.training.gradients import all_reduce_gradients
from course_lib.training.tensor.communication import (
    copy_to_ranks,
    gather_sequence,
)
from course_lib.training.tensor.divisibility import check_split
from course_lib.training.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from course_lib.training.tensor.loss import vocab_parallel_cross_entropy


class Attention(nn.Module):
    """Heads / n query heads and kv_heads / n kv heads on this rank; a query head and the kv head it reads stay together,
    for both lie in the order of their numbers."""

    def __init__(self, whole: Any, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.head_dim = whole.head_dim
        self.q = ColumnParallelLinear(whole.q_proj, group, enter=False)
        self.k = ColumnParallelLinear(whole.k_proj, group, enter=False)
        self.v = ColumnParallelLinear(whole.v_proj, group, enter=False)
        self.o = RowParallelLinear(whole.o_proj, group, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (batch, heads here, s, head_dim)
            for part in (self.q, self.k, self.v)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, whole: Any, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.gate = ColumnParallelLinear(whole.gate_proj, group, enter=False)
        self.up = ColumnParallelLinear(whole.up_proj, group, enter=False)
        self.down = RowParallelLinear(whole.down_proj, group, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, whole: Any, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.enter = group, gather_sequence if sequence_parallel else copy_to_ranks
        self.norm_1, self.norm_2 = whole.input_layernorm, whole.post_attention_layernorm
        self.attention = Attention(whole.self_attn, group, sequence_parallel)
        self.mlp = Mlp(whole.mlp, group, sequence_parallel)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: (batch, s, hidden), the same on every rank; under sequence parallelism (batch, s / n, hidden)."""
        x = x + self.attention(self.enter(self.norm_1(x), self.group), rotary)  # one f for q, k and v
        return x + self.mlp(self.enter(self.norm_2(x), self.group))  # one for gate and up


class TensorParallelLlama(nn.Module):
    """This rank's part of a Hugging Face Llama.

    Args:
        whole: the model, the same weights on every rank. Its norms are taken over, its matrices copied in part.
        group: the n tensor-parallel ranks; all of them get the same batch.
        sequence_parallel: between attention and MLP a rank holds s / n tokens of the hidden states; call
            `sum_partial_gradients` after the backward pass.
    """

    def __init__(self, whole: Any, group: dist.ProcessGroup, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        check_split(whole.config, group.size())
        self.config, self.group = whole.config, group
        self.sequence_parallel = sequence_parallel
        self.embedding = VocabParallelEmbedding(whole.model.embed_tokens, group, sequence_parallel=sequence_parallel)
        self.head = ColumnParallelLinear(whole.lm_head, group, sequence_parallel=sequence_parallel)
        if whole.config.tie_word_embeddings:
            self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block(layer, group, sequence_parallel) for layer in whole.model.layers)
        self.norm, self.rotary = whole.model.norm, whole.model.rotary_emb
        for norm in (self.norm, *(n for block in self.blocks for n in (block.norm_1, block.norm_2))):
            norm.weight.partial_gradient = sequence_parallel

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each next token, equal on every rank. Both (batch, s), as transformers takes them.

        Raises ValueError for a sequence that sequence parallelism cannot cut.
        """
        check_split(
            self.config, self.group.size(), seq_len=input_ids.shape[1], sequence_parallel=self.sequence_parallel
        )
        x = self.embedding(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # of the whole sequence
        rotary = self.rotary(x, position_ids=positions)
        for block in self.blocks:
            x = block(x, rotary)
        x = self.norm(x)
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]  # the last position has nothing to predict
        return vocab_parallel_cross_entropy(self.head(x), targets, self.group)

    def sum_partial_gradients(self) -> None:
        """After the backward pass: sum what norms and biases saw of their parts of the sequence, in one all-reduce.

        Without sequence parallelism every rank has seen all of it, and nothing is sent.
        """
        all_reduce_gradients([p for p in self.parameters() if getattr(p, "partial_gradient", False)], self.group)


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions on (batch, heads, s, head_dim), as transformers' Llama lays them out (arXiv:2104.09864)."""
    cosine, sine = (table[:, None] for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
