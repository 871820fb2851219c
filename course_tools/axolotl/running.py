"""Axolotl's own commands from a notebook: training on warm ranks, the others in one process each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.launch import Run, launch, warm_on_cpu
from course_tools.axolotl.overlays import merged, write

# What Axolotl imports before its first step: several seconds, which ranks that are forks of a warm server are spared.
SLOW = (
    "axolotl.cli.train",
    "axolotl.cli.config",
    "axolotl.common.datasets",
    "axolotl.train",
    "axolotl.core.builders",
    "axolotl.utils.schemas.config",
    "axolotl.loaders",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
ON_CPU = {
    "NUMBA_DISABLE_JIT": "1",  # compiling Axolotl's packing takes longer than packing the course's few hundred texts
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow starts a thread on import: no server forks with two
}

Config = str | os.PathLike[str] | Mapping[str, Any]

# Axolotl reports each start to its makers unless told otherwise. Its log is kept in full, in the logs of the run.
QUIET = {
    "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "AXOLOTL_LOG_LEVEL": "INFO",
}


def warm_axolotl() -> None:
    """Start the server that ranks are forked from, with Axolotl imported where that is safe. Returns at once."""
    os.environ.update(QUIET)
    warm_on_cpu(*SLOW, environment=ON_CPU)


@dataclass
class AxolotlRun:
    """The result of a training run.

    Attributes:
        losses: mean loss over the global batch, one a logged step.
        witness: what each rank held, by rank (see `course_tools.axolotl.witness.seen`).
        run: the launch: every collective, what the ranks printed, seconds.
        output_dir: where Axolotl saved.
    """

    losses: list[float]
    witness: list[dict[str, Any]]
    run: Run
    output_dir: Path

    @property
    def seconds(self) -> float:
        """From the call to the end of the last rank."""
        return self.run.seconds


def train(config: Config, *, ranks: int = 2, die_at: int | None = None, timeout: float = 120.0) -> AxolotlRun:
    """Train by a YAML with Axolotl's own trainer on `ranks` real ranks; NCCL where there are GPUs enough, else gloo.

    It is what ``axolotl train CONFIG --launcher torchrun -- --nproc_per_node RANKS`` runs in each process; only the
    processes come from `course_lib.launch`, which has PyTorch imported already and records the collectives.

    Args:
        config: a YAML file, or the mapping of one (see `merged`); its paths count from the working directory.
        die_at: planted failure: the last rank gets SIGKILL just before its update of this number, counted from 1.
        timeout: seconds the training may take.

    Raises:
        ValueError: a YAML that cannot be read, that names no `output_dir`, or whose plugins lack the witness.
        RankFailed: Axolotl refused the YAML, or a rank failed; RanksHung: as `launch`.
    """
    values = merged(config)
    if not values.get("output_dir"):
        raise ValueError("The YAML names no output_dir: give one, or Axolotl writes to ./model-out for every run.")
    if "course_tools.axolotl.witness.Witness" not in (values.get("plugins") or ()):
        raise ValueError(
            "Add course_tools.axolotl.witness.Witness to the YAML's plugins: it writes what each rank held."
        )
    output_dir = Path(values["output_dir"])
    shutil.rmtree(output_dir / "witness", ignore_errors=True)  # of an earlier run, which would be taken for this one's
    with tempfile.TemporaryDirectory(prefix="axolotl-") as folder:
        run = launch(_train, _written(values, folder), die_at, ranks=ranks, timeout=timeout, quiet=True, threads=1)
    from course_tools.axolotl.witness import read

    witness = read(output_dir)
    return AxolotlRun(witness[0]["losses"], witness, run, output_dir)


def _written(values: dict[str, Any], folder: str) -> str:
    """Write these values as a YAML in `folder` and return its path.

    A DeepSpeed configuration that stands in the YAML becomes a file there too: otherwise each rank writes one to the
    temporary folder and leaves it.
    """
    if isinstance(values.get("deepspeed"), Mapping):
        path = Path(folder, "deepspeed.json")
        path.write_text(json.dumps(values["deepspeed"]), encoding="utf-8")
        values = values | {"deepspeed": str(path)}
    return str(write(values, Path(folder, "run.yml")))


def _prepare(config: str) -> None:
    """Prepare a rank before Axolotl is called."""
    os.environ.update(QUIET)
    if os.path.isdir(merged(config).get("base_model") or ""):
        os.environ["HF_HUB_OFFLINE"] = "1"  # nothing to ask the hub about a model that lies here
    sys.argv[1:] = []  # axolotl parses what stands behind its command, and a rank has been given the launcher's words


def _train(config: str, die_at: int | None) -> None:
    """Run `axolotl.cli.train` in a rank."""
    _prepare(config)
    from axolotl.cli.train import do_cli

    if die_at is not None and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        _die_before(die_at)

    do_cli(config)


def _die_before(update: int) -> None:
    """Let this process end by SIGKILL when its trainer is about to make this update."""
    from transformers import TrainerCallback, trainer

    class Dies(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step + 1 == update:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.DEFAULT_CALLBACKS.append(Dies)


def preprocess(config: Config, *, timeout: float = 120.0) -> Path:
    """``axolotl preprocess CONFIG``: tokenize (and pack) the data once, on one process; returns where it lies."""
    folder = merged(config).get("dataset_prepared_path")
    if not folder:
        raise ValueError("The YAML names no dataset_prepared_path, so the prepared data would be lost: give a folder.")
    with tempfile.TemporaryDirectory(prefix="axolotl-") as place:
        launch(_preprocess, _written(merged(config), place), ranks=1, timeout=timeout, quiet=True, threads=1)
    return Path(folder)


def _preprocess(config: str) -> None:
    """Run `axolotl.cli.preprocess` in a rank."""
    _prepare(config)
    from axolotl.cli.preprocess import do_cli

    do_cli(config)
