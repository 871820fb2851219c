"""A plugin that records what each rank of an Axolotl run held, because a YAML and an exit code prove nothing.

In a YAML: ``plugins: [course_tools.axolotl.witness.Witness]``. After training, `output_dir/witness/rank0.json`, … name the
class that wrapped the model and how much of the model that rank held.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from axolotl.integrations.base import BasePlugin
from axolotl.utils.dict import DictDefault
from transformers import Trainer, TrainerCallback

FOLDER = "witness"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that lies on this rank: a DTensor's shard, ZeRO-3's partition, or all of it."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)


def total_elements(parameter: torch.Tensor) -> int:
    """Count the elements of the whole parameter, on all ranks together."""
    return getattr(parameter, "ds_numel", parameter.numel())


def state_elements(optimizer: Any) -> int:
    """Count the elements of this rank's optimizer states: Adam's moments, without the step counters."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # Accelerate's and DeepSpeed's wrappers
    return sum(
        local(value).numel()
        for states in optimizer.state.values()
        for value in states.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )


def seen(trainer: Trainer) -> dict[str, Any]:
    """Describe what this rank holds in the middle of training, in elements, not bytes.

    Keys: wrapper, world_size, backend, zero_stage (None without DeepSpeed), param_class and placements (of the first
    block's first trained weight), local_elements, total_elements, trainable_elements, optimizer_elements,
    quantized (4-bit weights, by number of tensors).
    """
    wrapped = trainer.model_wrapped
    parameters = list(trainer.model.named_parameters())
    sample = next(p for name, p in parameters if p.requires_grad and (".0." in name or "layers" in name))
    stage = getattr(wrapped, "zero_optimization_stage", None)
    grouped = dist.is_available() and dist.is_initialized()
    return {
        "wrapper": type(wrapped).__name__,
        "world_size": dist.get_world_size() if grouped else 1,
        "backend": dist.get_backend() if grouped else None,
        "zero_stage": stage() if stage else None,
        "param_class": type(sample).__name__,
        "placements": str(getattr(sample, "placements", "")) or None,
        "local_elements": sum(local(p).numel() for _, p in parameters),
        "total_elements": sum(total_elements(p) for _, p in parameters),
        "trainable_elements": sum(total_elements(p) for _, p in parameters if p.requires_grad),
        "optimizer_elements": state_elements(trainer.optimizer),
        "quantized": sum(type(p).__name__ == "Params4bit" for _, p in parameters),
    }


class _Watch(TrainerCallback):
    """Looks once, after the first optimizer step, and writes when training ends."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self.folder, self.trainer = folder, trainer
        self.held: dict[str, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.held:
            self.held = seen(self.trainer)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        logged = [entry for entry in state.log_history if "loss" in entry]
        rank = int(os.environ.get("RANK", "0"))
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.held | {
            "rank": rank,
            "steps": state.global_step,
            "logged_at": [entry["step"] for entry in logged],
            "losses": [entry["loss"] for entry in logged],
            "gradient_norms": [entry.get("grad_norm") for entry in logged],
        }
        (self.folder / f"rank{rank}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


class Witness(BasePlugin):
    """Adds the callback to every rank's trainer."""

    def post_trainer_create(self, cfg: DictDefault, trainer: Trainer) -> None:
        """Called by Axolotl once the trainer exists, before training."""
        trainer.add_callback(_Watch(Path(cfg.output_dir) / FOLDER, trainer))


def read(output_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read what the ranks of a finished run wrote, in the order of the ranks.

    Raises:
        FileNotFoundError: the run did not end, or had no `Witness` among its plugins.
    """
    files: Iterable[Path] = Path(output_dir, FOLDER).glob("rank*.json")
    records = sorted((json.loads(file.read_text(encoding="utf-8")) for file in files), key=lambda one: one["rank"])
    if not records:
        raise FileNotFoundError(
            f"{output_dir} holds no witness: the run did not reach its end, or its YAML's plugins lack "
            "course_tools.axolotl.witness.Witness."
        )
    return records
