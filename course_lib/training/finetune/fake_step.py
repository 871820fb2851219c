"""Count what a training step of a Llama of any size would allocate, on fake tensors that take no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from course_lib.memory import Shape
from course_lib.memory.allocator import Event
from course_lib.observe.fake import LiveStorages, fake_tensors
from course_lib.observe.memory import optimizer_tensors, tensor_bytes
from course_lib.training.finetune.activation_checkpointing import set_checkpointing


@dataclass(frozen=True)
class FakeStep:
    """Bytes of one full fine-tuning step in its steady state, the batch's own left out.

    Attributes:
        weights, gradients, optimizer: at rest; buffers are with the weights.
        peak: the most during forward and backward pass.
        step: the most during the optimizer's step.
        by_operation: at the peak, by the operation that made them.
    """

    weights: int
    gradients: int
    optimizer: int
    peak: int
    step: int
    by_operation: dict[str, int]


def llama(shape: Shape, *, dtype: torch.dtype = torch.float32, checkpointing: str = "none") -> LlamaForCausalLM:
    """A Llama of these widths in training mode, on whatever tensors the context makes (fake ones under `fake_tensors`)."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with _default_dtype(dtype):
        model = LlamaForCausalLM(config)
    set_checkpointing(model, checkpointing)
    return model.train()


def with_states(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW after a first step with gradients of 0: the states are there, gradients are not."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def count_step(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> FakeStep:
    """One step of `model` (real or fake), counted storage by storage."""
    with LiveStorages() as live:
        live.hold([*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer), batch])
        held = live.now
        model(input_ids=batch, labels=batch).loss.backward()
        peak, gradients, made_by = live.highest, live.now - held, live.by_operation()
        live.reset()
        optimizer.step()
        optimizer.zero_grad()
        return FakeStep(
            weights=tensor_bytes([*model.parameters(), *model.buffers()]),
            gradients=gradients,
            optimizer=tensor_bytes(optimizer_tensors(optimizer)),
            peak=peak - batch.nbytes,
            step=live.highest - batch.nbytes,
            by_operation=made_by,
        )


def fake_step(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    checkpointing: str = "none",
    micro_batch: int = 1,
    seq_len: int = 2048,
) -> FakeStep:
    """A step of the Llama of these widths, all tensors of `dtype`, no autocast. 8B: a few seconds; 70B: about 20."""
    with fake_tensors():
        model = llama(shape, dtype=dtype, checkpointing=checkpointing)
        return count_step(model, with_states(model), torch.zeros(micro_batch, seq_len, dtype=torch.long))


def fake_events(
    shape: Shape, *, dtype: torch.dtype, checkpointing: str, micro_batch: int, seq_len: int, steps: int = 3
) -> tuple[list[Event], int]:
    """Every allocation and free of the first steps of a run, for `course_lib.memory.allocator.replay`; and the peak."""
    with fake_tensors():
        model = llama(shape, dtype=dtype, checkpointing=checkpointing)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with LiveStorages() as live:
            live.hold([*model.parameters(), *model.buffers()])
            for _ in range(steps):
                batch = torch.zeros(micro_batch, seq_len, dtype=torch.long)
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return list(live.log), live.highest


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
