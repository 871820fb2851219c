"""``save`` and ``save_async``: one checkpoint of all ranks, whole or not there."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checkpoints import fsdp, state, zero
from course_lib.checkpoints.draft import Draft
from course_lib.checkpoints.manifest import Manifest, fingerprint
from course_lib.checkpoints.together import place


def save(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: torch.nn.Module | None = None,
    engine: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    keep: int = 2,
    trainable_only: bool = False,
    kind: str | None = None,
) -> Path:
    """Save a checkpoint as ``folder/step-00000010``; every rank calls it, and gets its path when it is whole.

    It is written beside its place and renamed at the end, so whatever happens meanwhile the older checkpoints are whole.
    The state of the random numbers goes with it.

    Args:
        folder: one that all ranks share; made if it is not there. One run saves into it.
        step: optimizer steps done.
        model: sharded by ``fully_shard``, or plain; or ``engine``: DeepSpeed's, which brings its optimizer and scheduler.
        optimizer: whose state to save.
        scheduler: a learning-rate scheduler of PyTorch's.
        extra: plain JSON that ``load`` gives back: the position in the data, say.
        keep: whole checkpoints to keep, this one included; older ones are removed.
        trainable_only: leave frozen parameters out (LoRA: a few MB instead of the whole model).
        kind: ``"fsdp"`` for a model, ``"zero"`` for an engine; may be left out.

    Raises:
        ValueError: arguments that do not go together.
        CheckpointError: the disk is full, the folder cannot be written or is not shared, another save is under way.
    """
    model, engine = check_target(model, engine, optimizer, scheduler, kind)
    head = _head(step, model, engine, optimizer, extra, keep, trainable_only)
    draft = Draft(folder, step)
    with draft.writing() as path:
        if engine is None:
            fsdp.write(path, model, optimizer, trainable_only)
        else:
            zero.write(path, engine)
    with draft.writing() as path:
        state.write(path, place()[0], scheduler)
    return draft.publish(head, keep)


def save_async(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    keep: int = 2,
    trainable_only: bool = False,
) -> Future[Path]:
    """``save`` for a model, while training goes on: the state is copied to host memory, then written by a thread.

    Returns when the copy is taken; ``.result()`` waits for the path, and raises CheckpointError where ``save`` would.
    Takes host memory for one copy of this rank's shards. One at a time: wait for the last before the next, and before
    the process group goes down.
    """
    model, _ = check_target(model, None, optimizer, scheduler, "fsdp")
    head = _head(step, model, None, optimizer, extra, keep, trainable_only)
    draft = Draft(folder, step)
    with draft.writing() as path:
        state.write(path, place()[0], scheduler)
    with draft.writing() as path:
        writer = fsdp.Writer(path / fsdp.FOLDER)
        copied = writer.stage(fsdp.state(model, optimizer, trainable_only))
    # No thread starts before every rank has come this far: one without its peers would wait for them for ever, and make
    # folders again that rank 0 has just removed. The thread's collectives must not mix with the training's, so it gets a
    # group of its own, on the host.
    group = dist.new_group(backend="gloo") if place()[1] > 1 else None
    done: Future[Path] = Future()

    def finish() -> None:
        result: Path | BaseException
        try:
            with draft.writing(group):
                fsdp.write_copy(writer, copied, group)
            result = draft.publish(head, keep, group)
        except BaseException as error:  # carried to whoever asks for the result
            result = error
        if group is not None:
            dist.destroy_process_group(group)  # before anybody goes on and takes the whole group down
        done.set_exception(result) if isinstance(result, BaseException) else done.set_result(result)

    threading.Thread(target=finish, name=f"checkpoint of step {step}").start()
    return done


def check_target(model: Any, engine: Any, optimizer: Any, scheduler: Any, kind: str | None) -> tuple[Any, Any]:
    """(model, None) or (None, engine). Raises ValueError where the arguments do not go together."""
    if hasattr(model, "zero_optimization_stage"):
        model, engine = None, model
    if (model is None) == (engine is None):
        raise ValueError("give either model= (FSDP, or a plain one) or engine= (DeepSpeed's).")
    if kind not in (None, "fsdp" if engine is None else "zero"):
        raise ValueError(
            f"kind={kind!r} does not go with {'a model' if engine is None else 'an engine'}: leave it out."
        )
    if engine is not None and (optimizer is not None or scheduler is not None):
        raise ValueError(
            "a DeepSpeed engine saves its own optimizer and scheduler: leave optimizer= and scheduler= out."
        )
    return model, engine


def _head(
    step: int,
    model: torch.nn.Module | None,
    engine: Any,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any] | None,
    keep: int,
    trainable_only: bool,
) -> Manifest:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
    try:
        plain = json.loads(json.dumps(extra or {})) == (extra or {})
    except (TypeError, ValueError):
        plain = False
    if not plain or not isinstance(extra or {}, dict):
        raise ValueError("extra= must be plain JSON: a dict with names of str, numbers, strings, lists.")
    module = model if engine is None else engine.module
    if engine is None and not trainable_only:
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(f"{name} is quantized: save with trainable_only=True, its base comes from elsewhere.")
    return Manifest(
        step=step,
        kind="fsdp" if engine is None else "zero",
        world_size=place()[1],
        model=fingerprint(module),
        extra=extra or {},
        optimizer=type(optimizer).__name__ if optimizer is not None else "",
        trainable_only=trainable_only and engine is None,
        zero_stage=None if engine is None else int(engine.zero_optimization_stage()),
        versions=_versions("torch") if engine is None else _versions("torch", "deepspeed"),
    )


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
