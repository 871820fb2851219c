"""A checkpoint of sharded training as a folder that ``from_pretrained`` reads: safetensors and config.json."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch

from course_lib.checkpoints import folder, sharded_state
from course_lib.checkpoints.errors import CheckpointError, reason
from course_lib.checkpoints.manifest import verify
from course_lib.models import no_progress_bars

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def weights(checkpoint: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The whole model's tensors, by name, from a checkpoint or from a folder's newest complete one.

    Every checksum is compared first. One process calls it; no process group and no GPU are needed, but host memory for
    the whole model. Raises CheckpointError as ``load`` does.
    """
    path = folder.find(checkpoint)
    verify(path)
    return sharded_state.weights(path)


def to_hugging_face(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: PretrainedConfig,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a checkpoint's weights as a folder for ``AutoModelForCausalLM.from_pretrained(out)``; one process calls it.

    Args:
        checkpoint: one that ``save`` made, or a folder of them: then its newest complete one.
        out: the folder to make; it appears when it is complete.
        config: the model's own, ``model.config``.
        dtype: of the weights; None keeps the checkpoint's.

    Raises:
        FileExistsError: ``out`` is there already, and not empty.
        CheckpointError: as ``load``; the weights are not of the model that ``config`` describes; the disk is full.
    """
    from transformers import AutoModelForCausalLM

    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already: give a folder that is empty or not there yet.")
    found = weights(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = model.state_dict()
    tied = set(wanted) - {name for name, _ in model.named_parameters()} - {name for name, _ in model.named_buffers()}
    missing = sorted(set(wanted) - set(found) - tied)
    added = sorted(set(found) - set(wanted))
    wrong = [name for name, tensor in wanted.items() if name in found and found[name].shape != tensor.shape]
    for names, verb in ((missing, "lacks"), (added, "adds"), (wrong, "has another shape for")):
        if names:
            raise CheckpointError(f"{checkpoint} is of another model than config describes: it {verb} {names[0]!r}.")
    model.load_state_dict({k: v.to(dtype) if dtype else v for k, v in found.items()}, strict=False, assign=True)
    model.tie_weights()
    part = target.with_name(f".{target.name}.part-{uuid4().hex[:8]}")
    try:
        part.mkdir(parents=True)
        model.config.dtype = next(model.parameters()).dtype
        with no_progress_bars():
            model.save_pretrained(part)
        os.replace(part, target)  # an empty folder may stand in its place
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{target} was not written: {reason(error, target)}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target
