"""Axolotl's own commands from a notebook: training on warm ranks, the others in one process each."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
import types
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


def train(config: Config, *, ranks: int = 2, timeout: float = 120.0) -> AxolotlRun:
    """Train by a YAML with Axolotl's own trainer on `ranks` real ranks; NCCL where there are GPUs enough, else gloo.

    It is what ``axolotl train CONFIG --launcher torchrun -- --nproc_per_node RANKS`` runs in each process; only the
    processes come from `course_lib.launch`, which has PyTorch imported already and records the collectives.

    Args:
        config: a YAML file, or the mapping of one (see `merged`); its paths count from the working directory.
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
        run = launch(_train, _written(values, folder), ranks=ranks, timeout=timeout, quiet=True, threads=1)
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


def _train(config: str) -> None:
    """Run `axolotl.cli.train` in a rank."""
    _prepare(config)
    from axolotl.cli.train import do_cli

    do_cli(config)


def preprocess(config: Config, *, timeout: float = 120.0) -> Path:
    """``axolotl preprocess CONFIG``: tokenize (and pack) the data once, on one process; returns where it lies."""
    folder = merged(config).get("dataset_prepared_path")
    if not folder:
        raise ValueError("The YAML names no dataset_prepared_path, so the prepared data would be lost: give a folder.")
    _in_one_process("axolotl.cli.preprocess", config, timeout)
    return Path(folder)


def merge_lora(config: Config, *, timeout: float = 120.0) -> Path:
    """``axolotl merge-lora CONFIG``: the adapter of `output_dir` added to its base model; returns the merged folder."""
    adapter = Path(merged(config).get("output_dir") or "")
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{adapter} holds no adapter_config.json: train with adapter: lora first.")
    _in_one_process("axolotl.cli.merge_lora", config, timeout, lora_model_dir=str(adapter))
    return adapter / "merged"


def inference(config: Config, prompt: str, *, base_model: str | os.PathLike[str], timeout: float = 120.0) -> str:
    """``axolotl inference CONFIG``: what the model of the folder `base_model` answers; returns what Axolotl printed."""
    if not prompt.strip():
        raise ValueError("Give a prompt: Axolotl's inference ends at an empty one.")
    whole = merged(config, adapter=None, load_in_4bit=None, base_model=os.fspath(base_model))
    output = _in_one_process("axolotl.cli.inference", whole, timeout, typed=prompt)
    return output.split("=" * 80)[-3].strip()  # then it asks for the next prompt, and there is none


def _in_one_process(module: str, config: Config, timeout: float, typed: str = "", **arguments: str) -> str:
    with tempfile.TemporaryDirectory(prefix="axolotl-") as folder:
        path = _written(merged(config), folder)
        run = launch(_command, module, path, typed, arguments, ranks=1, timeout=timeout, quiet=True, threads=1)
    return run.logs[0]


def _command(module: str, config: str, typed: str, arguments: dict[str, str]) -> None:
    """Run one of Axolotl's commands in a rank, with `typed` as its keyboard input."""
    _prepare(config)
    if importlib.util.find_spec("gradio") is None:  # imported by all of inference, and used by its web page alone
        sys.modules["gradio"] = types.ModuleType("gradio")
    sys.stdin = io.StringIO(typed)
    importlib.import_module(module).do_cli(config, **arguments)
