"""DeepSpeed's sharded state: each rank writes its slice, and reads it back at the same number of ranks.

At another number the slices are put together to whole tensors first, DeepSpeed's "universal checkpoint", from which
each rank of the new engine cuts its own. https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from course_lib.checkpoints.errors import CheckpointError, gather, rank_and_world_size, share, together
from course_lib.checkpoints.folder import WHOLE_TENSORS
from course_lib.checkpoints.manifest import Manifest
from course_lib.checkpoints.sharded_state import save_file, weights_only

FOLDER = "zero"


def write(path: Path, engine: Any) -> None:
    """Collective: every rank writes its slice below ``path``; a rank that cannot write raises after the others are done."""
    from deepspeed.checkpoint.constants import (
        UNIVERSAL_CHECKPOINT_INFO,
        UNIVERSAL_CHECKPOINT_VERSION_KEY,
        UNIVERSAL_CHECKPOINT_VERSION_VALUE,
    )

    # without this note DeepSpeed's converter refuses what stages 1 and 2 have saved
    note = {UNIVERSAL_CHECKPOINT_INFO: {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}}
    with _failures_wait(engine) as failed:
        engine.save_checkpoint(str(path), tag=FOLDER, client_state=note, save_latest=False)
    if failed:
        raise failed[0]


@contextmanager
def _failures_wait(engine: Any) -> Iterator[list[Exception]]:
    """DeepSpeed's ranks wait for each other after writing: one that stops at a full disk would leave the rest hanging."""
    failed: list[Exception] = []

    def save(state_dict: dict[str, Any], path: str) -> None:
        try:
            save_file(state_dict, Path(path))
        except (OSError, RuntimeError) as error:
            failed.append(error)

    def skip_copy(save_path: str) -> None:
        """DeepSpeed copies its converter, a Python program, beside the weights; ours is ``to_hugging_face``."""

    engine.checkpoint_engine.save, engine._copy_recovery_script = save, skip_copy
    try:
        yield failed
    finally:
        del engine.checkpoint_engine.save, engine._copy_recovery_script


@contextmanager
def _weights_only() -> Iterator[None]:
    """As ``weights_only``, with the plain classes that DeepSpeed saves beside its tensors."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed's first import looks for GPUs of every make
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with weights_only([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
        yield


def read(path: Path, manifest: Manifest, engine: Any) -> None:
    """Collective: load a checkpoint into an engine of the same stage, at any world size."""
    stage, world_size = int(engine.zero_optimization_stage()), rank_and_world_size()[1]
    if stage != manifest.zero_stage:
        raise CheckpointError(
            f"{path} was saved by ZeRO stage {manifest.zero_stage} and this engine has stage {stage}: use the same stage, or "
            "carry the weights over with to_hugging_face."
        )
    if stage == 0 or world_size == manifest.world_size:
        _load(engine, path)
        return
    if stage == 3 and not all(parameter.requires_grad for parameter in engine.module.parameters()):
        raise CheckpointError(
            f"{path} was saved by {manifest.world_size} ranks; with frozen parameters stage 3 goes on at {manifest.world_size} "
            "ranks only: use as many, or carry the weights over with to_hugging_face."
        )
    with _universal(path) as whole:
        config = engine._config
        asked, config.load_universal_checkpoint = config.load_universal_checkpoint, True
        try:
            _load(engine, whole)
        finally:
            config.load_universal_checkpoint = asked
    if stage < 3:
        _load_the_rest(engine, path)


def _load(engine: Any, path: Path) -> None:
    with _weights_only():
        found, _ = engine.load_checkpoint(str(path), tag=FOLDER)
    if found is None:
        raise CheckpointError(f"DeepSpeed finds no checkpoint of its own in {path / FOLDER}.")


def _load_the_rest(engine: Any, path: Path) -> None:
    """Buffers and frozen parameters: a universal checkpoint brings back what the optimizer trains, and no more."""
    saved = _module(path)
    trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    engine.module.load_state_dict({k: v for k, v in saved.items() if k not in trained}, strict=False)


@contextmanager
def _universal(path: Path) -> Iterator[Path]:
    """The checkpoint as whole tensors, made by rank 0 beside it for all ranks to read, and removed afterwards.

    Takes as much of the disk as the checkpoint again.
    """
    rank, world_size = rank_and_world_size()
    whole = path.parent / f"{WHOLE_TENSORS}{uuid4().hex[:8]}"
    try:
        with together(f"{path} was not put together for {world_size} ranks", path):
            if rank == 0:
                _convert(path / FOLDER, whole / FOLDER)
        yield share(whole)
        gather(None)  # nobody removes what another still reads
    finally:
        if rank == 0:
            shutil.rmtree(whole, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with _weights_only(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ds_to_universal.main(options)


def _module(path: Path) -> dict[str, torch.Tensor]:
    """The module's state as stages 0 to 2 save it, once."""
    with _weights_only():
        return torch.load(path / FOLDER / "mp_rank_00_model_states.pt", map_location="cpu")["module"]


def weights(path: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The whole model's parameters in fp32 and its buffers, by name."""
    if manifest.zero_stage == 0:
        return dict(_module(path))
    with _weights_only(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return dict(get_fp32_state_dict_from_zero_checkpoint(str(path), tag=FOLDER))
