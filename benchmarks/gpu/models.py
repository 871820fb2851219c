"""Llamas with random weights in the shape of published ones, and a training step of them: memory and speed ask no more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from course_lib import models
from course_lib.memory import PRESETS
from course_lib.training import methods


def llama(preset: str, *, device: Any, method: str = "full", precision: str = "bf16-mixed", **how: Any) -> Any:
    """A Llama of that preset's shape, drawn on the device in the dtype it is kept in; `how` is `methods.prepare`'s."""
    with torch.device(device):
        model = models.llama(PRESETS[preset], dtype=methods.dtypes(method, precision).weights)
    model = methods.prepare(model, method=method, precision=precision, device=device, **how)
    if method == "qlora" and torch.device(device).type == "cuda":
        # nobody else has the whole model on the card unquantized: what is left of it must not look like the allocator's waste
        model.to("cpu")
        torch.cuda.empty_cache()
        model.to(device)
    return model


def build_optimizer(model: Any, name: str) -> torch.optim.Optimizer:
    """Over what the model trains: "adamw" (fused: its step needs no temporary tensors), "sgd", or one of bitsandbytes.

    "adamw8bit" has uint8 moments, fp32 ones for tensors below 4,096 numbers (arXiv:2110.02861); "paged_adamw8bit" the
    same in memory that CUDA moves to the host when the card is full.
    """
    trained = methods.trainable(model)
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=1e-4, fused=True)
    if name == "sgd":
        return torch.optim.SGD(trained, lr=1e-4)
    from bitsandbytes import optim

    return {"adamw8bit": optim.AdamW8bit, "paged_adamw8bit": optim.PagedAdamW8bit}[name](trained, lr=1e-4)


def loss_of(model: Any, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Token ids (sequences, tokens) -> mean loss.

    "eager": as transformers computes it, with all logits in fp32. "chunked": 1,024 tokens' logits at a time, computed
    again in backward. "fused": output layer and loss compiled together.
    """
    if kind == "eager":
        return lambda ids: model(input_ids=ids, labels=ids).loss
    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def total(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(base.lm_head(hidden).float(), targets, reduction="sum")

    one = torch.compile(total) if kind == "fused" else total

    def loss(ids: torch.Tensor) -> torch.Tensor:
        hidden = base.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        targets = ids[:, 1:].flatten()
        if kind == "fused":
            return one(hidden, targets) / len(targets)
        pairs = zip(hidden.split(1024), targets.split(1024), strict=True)
        return sum(checkpoint(one, h, t, use_reentrant=False) for h, t in pairs) / len(targets)

    return loss


class Training:
    """A model, an optimizer and a batch; `step()` trains once and returns the loss, on its device."""

    def __init__(
        self,
        preset: str,
        *,
        device: Any,
        precision: str,
        optimizer: str = "adamw",
        loss: str = "eager",
        compiled: bool = False,
        micro_batch_size: int,
        seq_len: int,
        **how: Any,
    ) -> None:
        self.device, self.precision = torch.device(device), precision
        self.model = llama(preset, device=self.device, precision=precision, **how)
        self.optimizer = build_optimizer(self.model, optimizer)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16-mixed")
        self.ids = torch.randint(0, PRESETS[preset].vocab, (micro_batch_size, seq_len), device=self.device)
        if compiled:  # the blocks are alike, so one compilation serves all of them
            for block in (module for module in self.model.modules() if isinstance(module, LlamaDecoderLayer)):
                block.compile()
        self.loss = loss_of(self.model, loss)

    def step(self) -> torch.Tensor:
        with methods.autocast(self.precision, self.device):
            loss = self.loss(self.ids)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


def free(device: torch.device) -> None:
    """Give back what nobody holds, so that the next piece starts on an empty card."""
    torch.compiler.reset()  # else a second model's blocks count as recompilations of the first's
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # the caching allocator's, and in the midst of its segments
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
