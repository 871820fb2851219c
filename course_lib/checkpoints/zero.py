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

from course_lib.checkpoints import pickles
from course_lib.checkpoints.errors import CheckpointError
from course_lib.checkpoints.folder import WHOLE_TENSORS
from course_lib.checkpoints.manifest import Manifest, stays_inside
from course_lib.checkpoints.state import save_and_look
from course_lib.checkpoints.together import gather, place, share, together

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
    with _failing_late(engine) as failed:
        engine.save_checkpoint(str(path), tag=FOLDER, client_state=note, save_latest=False)
    if failed:
        raise failed[0]


@contextmanager
def _failing_late(engine: Any) -> Iterator[list[Exception]]:
    """DeepSpeed's ranks wait for each other after writing: one that stops at a full disk would leave the rest hanging."""
    failed: list[Exception] = []

    def save(state_dict: dict[str, Any], path: str) -> None:
        try:
            save_and_look(state_dict, Path(path), pickles.DEEPSPEED_NAMES)
        except (OSError, RuntimeError, CheckpointError) as error:
            failed.append(error)

    def skip_copy(save_path: str) -> None:
        """DeepSpeed copies its converter, a Python program, beside the weights; ours is ``to_hugging_face``."""

    engine.checkpoint_engine.save, engine._copy_recovery_script = save, skip_copy
    try:
        yield failed
    finally:
        del engine.checkpoint_engine.save, engine._copy_recovery_script


def vet(path: Path, names: list[str]) -> None:
    """Raise CheckpointError unless torch's weights-only reader takes every .pt file of ``names``.

    Only then DeepSpeed, which unpickles blindly, may see them; nobody else may write into the folder meanwhile.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # else its first import looks for GPUs of every make, and says so
    for name in names:
        if not (name.startswith(f"{FOLDER}/") and name.endswith(".pt")):
            continue
        for parameter in _parameters(pickles.torch_file(path / name, pickles.DEEPSPEED_NAMES)):
            if not (isinstance(parameter, str) and stays_inside(parameter)):  # DeepSpeed makes folders of these names
                raise CheckpointError(f"{path / name} has a parameter {parameter!r}: tampered with.")


def _parameters(state: Any) -> Iterator[Any]:
    """The parameters' names wherever a file of DeepSpeed's has them."""
    optimizer = state.get("optimizer_state_dict") if isinstance(state, dict) else None
    tables = [state.get("module"), state.get("param_shapes")] if isinstance(state, dict) else []
    tables.append(optimizer.get("param_slice_mappings") if isinstance(optimizer, dict) else None)
    for table in tables:
        for names in table if isinstance(table, list) else [table or {}]:
            yield from names


def read(path: Path, told: Manifest, engine: Any) -> None:
    """Collective: load a checkpoint, whose files have been vetted, into an engine of the same stage, at any world size."""
    stage, world_size = int(engine.zero_optimization_stage()), place()[1]
    if stage != told.zero_stage:
        raise CheckpointError(
            f"{path} was saved by ZeRO stage {told.zero_stage} and this engine has stage {stage}: use the same stage, or "
            "carry the weights over with to_hugging_face."
        )
    if stage == 0 or world_size == told.world_size:
        _load(engine, path)
        return
    if stage == 3 and not all(parameter.requires_grad for parameter in engine.module.parameters()):
        raise CheckpointError(
            f"{path} was saved by {told.world_size} ranks; with frozen parameters stage 3 goes on at {told.world_size} "
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
    found, _ = engine.load_checkpoint(str(path), tag=FOLDER)
    if found is None:
        raise CheckpointError(f"DeepSpeed finds no checkpoint of its own in {path / FOLDER}.")


def _load_the_rest(engine: Any, path: Path) -> None:
    """Buffers and frozen parameters: a universal checkpoint brings back what the optimizer trains, and no more."""
    saved = pickles.torch_file(path / FOLDER / "mp_rank_00_model_states.pt", pickles.DEEPSPEED_NAMES)["module"]
    trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    engine.module.load_state_dict({k: v for k, v in saved.items() if k not in trained}, strict=False)


@contextmanager
def _universal(path: Path) -> Iterator[Path]:
    """The checkpoint as whole tensors, made by rank 0 beside it for all ranks to read, and removed afterwards.

    Takes as much of the disk as the checkpoint again.
    """
    rank, world_size = place()
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
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ds_to_universal.main(options)


def weights(path: Path, told: Manifest) -> dict[str, torch.Tensor]:
    """The whole model's parameters in fp32 and its buffers, by name, from a checkpoint whose files have been vetted."""
    if told.zero_stage == 0:
        return dict(pickles.torch_file(path / FOLDER / "mp_rank_00_model_states.pt", pickles.DEEPSPEED_NAMES)["module"])
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(path), tag=FOLDER))
