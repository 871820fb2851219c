"""The state of a resumable run beside its tensors, and a fingerprint of all of it."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass
class Progress:
    """Where a run stands; a checkpoint keeps it as JSON.

    Attributes:
        step: updates done.
        position: the next batch of the data. Ahead of ``step`` by the batches that were skipped.
        drawn: how often every virtual rank has begun a stream of random numbers: with the seed, the whole state of the
            dropout's generators (``gradient_sums.stream_seed``).
    """

    step: int = 0
    position: int = 0
    drawn: int = 0


def warm_up_and_cosine(warmup: int, steps: int) -> Callable[[int], float]:
    """The share of the full learning rate by updates done: up in ``warmup`` updates, then down to a tenth at ``steps``."""

    def share(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (done - warmup) / max(1, steps - warmup))))

    return share


def set_dropout(model: Any, share: float) -> None:
    """Dropout for a Llama, which comes without: of attention weights, and of what each MLP adds."""
    for block in model.model.layers:
        block.self_attn.attention_dropout = share
        if not hasattr(block.mlp, "dropout"):
            block.mlp.register_forward_hook(_drop)
        block.mlp.dropout = share


def _drop(mlp: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
    return F.dropout(output, mlp.dropout, mlp.training)


def configuration(model: Any, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    """What decides the losses, read off the objects that act and not off the options that were meant to set them."""
    group = optimizer.param_groups[0]
    first = next(model.parameters())
    shares = [getattr(m, name, 0.0) for m in model.modules() for name in ("dropout", "attention_dropout")]
    return {
        "dropout": max(shares) if model.training else 0.0,
        "lr": group["initial_lr"],
        "optimizer": type(optimizer).__name__,
        "betas": list(group["betas"]),
        "weight_decay": group["weight_decay"],
        "dtype": str(first.dtype).removeprefix("torch."),
        "device": first.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        **more,
    }


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """16 hexadecimal digits of a SHA-256 for each tensor of the model and each of the optimizer's state, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[parameter]} / {key}": digest(value) for key, value in state.items()}
    return found


def digest(value: Any) -> str:
    """16 hexadecimal digits for a tensor's bytes, or for a number."""
    tensor = torch.as_tensor(value).detach().cpu().contiguous()
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def snapshot(model: Any, optimizer: Any, scheduler: Any, at: Progress) -> dict[str, Any]:
    """Everything that must come back after a resume, small enough for a line of a journal."""
    return {
        **asdict(at),
        "scheduler": scheduler.last_epoch,
        "next_lr": optimizer.param_groups[0]["lr"],
        "state": fingerprint(model, optimizer),
    }
