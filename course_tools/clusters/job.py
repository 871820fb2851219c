"""One run, described once: what to train, on how many machines with how many GPUs, and what to do when it breaks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from course_lib.memory.cards import CARDS, card
from course_lib.validation import check_counts, positive
from course_tools.clusters.validation import CONTROL_CHARACTER, check_environment, check_job_name, check_line

CPU = "cpu"  # instead of a card: ranks on CPU over gloo
TO_LEAVE = 20  # seconds of a notice that are kept for what follows the ranks: torchrun's own end, and queueing again


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run that any of the targets can be asked for. Give `config` or `command`, not both.

    Attributes:
        name: of the job on the cluster: small letters, digits, dashes.
        config: an Axolotl YAML; the launch files train it, resume it and send its output to `output_dir`.
        command: what torchrun is to start, ``"-m my_package.train --steps 20"`` or ``"train.py --lr 1e-4"``, as one line
            or as a list of words; ``{output_dir}`` in it becomes the output folder.
        num_nodes: machines.
        gpus_per_node: GPUs of each machine, and so ranks of each machine.
        gpu: a card of `course_lib.memory.cards`, or "cpu": no GPU asked for, `gpus_per_node` ranks on CPU.
        cpus_per_gpu: CPU cores for each rank: it needs one itself, and its data loader's workers the others.
        hours: limit of one attempt, enforced by Slurm, Kubernetes and Azure ML.
        image: container image; Kubernetes and Azure ML need one, SkyPilot takes one.
        env: environment variables of every rank, besides those of `variables`.
        secrets: names of variables whose values stay in your environment, or in the cluster's store of secrets.
        setup: shell lines to run first on every machine, such as "source .venv/bin/activate".
        output_dir: folder for checkpoints and results; the same storage on every machine and in every attempt. By
            default the config's own output_dir, or else runs/NAME.
        max_restarts: how often torchrun's agents, and the scheduler where it can, may start again after a failure.
        notice: seconds of warning before a time limit or a preemption ends the run.
        code: the folder that Azure ML and SkyPilot send along, and which holds `config`.
        options: settings of one target only (`course_tools.clusters.options_of`), such as {"partition": "gpu"}.
    """

    name: str
    config: str | None = None
    command: str | Sequence[str] | None = None
    num_nodes: int = 1
    gpus_per_node: int | None = None
    gpu: str = "a100-80gb"
    cpus_per_gpu: int = 8
    hours: float = 24
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    setup: Sequence[str] = ()
    output_dir: str | None = None
    max_restarts: int = 3
    notice: int = 120
    code: str = "."
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_job_name(self.name)
        if self.gpus_per_node is None:
            raise ValueError("gpus_per_node is missing: say how many GPUs each machine has, for one rank runs on each.")
        check_counts(num_nodes=self.num_nodes, gpus_per_node=self.gpus_per_node, cpus_per_gpu=self.cpus_per_gpu)
        for name in ("max_restarts", "notice"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r}: give a whole number of at least 0.")
        positive(hours=self.hours)
        if self.seconds <= 2 * self.notice:
            raise ValueError(
                f"notice={self.notice} seconds is half of hours={self.hours:g} or more: ask for more hours."
            )
        self._check_gpu()
        for name in ("secrets", "setup"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: give a list of texts.")
        check_line(**{f"setup[{number}]": text for number, text in enumerate(self.setup)}, code=self.code)
        check_environment(self.env, list(self.secrets))
        if self.image is not None:
            check_line(image=self.image)
            if " " in self.image:
                raise ValueError(f"image={self.image!r}: an image's name has no spaces in it.")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options={self.options!r}: give a dict of texts, such as {{'partition': 'gpu'}}.")
        check_line(**{f"options[{name!r}]": text for name, text in self.options.items()})
        self._check_program()

    def _check_gpu(self) -> None:
        if self.gpu == CPU:
            return
        if card(self.gpu).name not in CARDS:
            raise ValueError(f"gpu={self.gpu!r} is an amount of memory: name the card to rent, such as 'a100-80gb'.")
        object.__setattr__(self, "gpu", card(self.gpu).name)

    def _check_program(self) -> None:
        if (self.config is None) == (self.command is None):
            raise ValueError("Give either config=, an Axolotl YAML, or command=, what torchrun is to start.")
        settings = {}
        if self.config is not None:
            settings = _read_config(self.config)
        else:
            object.__setattr__(self, "command", tuple(_split_command(self.command)))
        output_dir = self.output_dir or settings.get("output_dir") or f"runs/{self.name}"
        check_line(output_dir=output_dir)
        object.__setattr__(self, "output_dir", output_dir)

    @property
    def summary(self) -> str:
        """The job in one line, for the top of each file."""
        what = self.config if self.config is not None else " ".join(self.command)
        where = "on CPU" if self.gpu == CPU else f"on {self.gpu}"
        return f"{self.name}: {what}, {self.num_nodes} x {self.gpus_per_node} = {self.world_size} ranks {where}"

    @property
    def config_in_code(self) -> str | None:
        """Where the config lies inside the folder `code`, which is sent to the machines."""
        if self.config is None:
            return None
        inside = Path(os.path.relpath(self.config, self.code))
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"config={self.config!r} lies outside code={self.code!r}, so no machine would receive it.")
        return str(PurePosixPath(*inside.parts))

    @property
    def world_size(self) -> int:
        """Ranks over all machines."""
        return self.num_nodes * self.gpus_per_node

    @property
    def seconds(self) -> int:
        """`hours` in whole seconds."""
        return max(1, round(self.hours * 3600))

    @property
    def cpus(self) -> int:
        """CPU cores asked of each machine."""
        return self.gpus_per_node * self.cpus_per_gpu

    @property
    def shutdown_timeout(self) -> int:
        """Seconds that torchrun gives its ranks between SIGTERM and SIGKILL, to save in."""
        return max(1, self.notice - TO_LEAVE)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every rank, secrets left out."""
        # Without NCCL_DEBUG, NCCL says nothing when a link breaks; WARN prints one line in a healthy run.
        # With a shared store, the ranks of a second attempt read the first attempt's addresses and hang:
        # github.com/pytorch/pytorch/issues/135712, and seen with torch 2.13 over two agents.
        usual = {"NCCL_DEBUG": "WARN", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        # torchrun would give 30 seconds. Not its option --shutdown-timeout: PyTorch before 2.12 refuses that, and ignores
        # this, and always gives 30.
        usual["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(self.shutdown_timeout)
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.gpu == CPU else {}  # or ranks on CPU would find a GPU after all
        return usual | hidden | dict(self.env)


def _read_config(config: Any) -> dict[str, Any]:
    """Read an Axolotl YAML; what its settings mean is checked by `beyond check`."""
    check_line(config=config)
    path = Path(config)
    if not path.is_file():
        raise ValueError(f"config={config!r}: there is no such file here.")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"config={config!r}, {where}this is no YAML: {getattr(error, 'problem', error)}.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"config={config!r}: an Axolotl YAML is made of lines such as 'base_model: NAME'.")
    return settings


def _split_command(command: Any) -> list[str]:
    """Return the words after torchrun's own options: ``-m module …`` or ``script.py …``."""
    if isinstance(command, str):
        check_line(command=command)
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"command={command!r}: a quotation mark is not closed.") from error
    else:
        words = list(command)
        for number, word in enumerate(words):
            if not isinstance(word, str) or CONTROL_CHARACTER.search(word):
                raise ValueError(f"command[{number}]={word!r}: give texts of one line.")
    if words[:1] == ["torchrun"]:
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1 and all(part.isidentifier() for part in words[1].split(".")):
        return words
    if words and words[0].endswith(".py") and not words[0].startswith("-"):
        return words
    raise ValueError(
        f"command={command!r}: write what torchrun starts, '-m module …' or 'script.py …'; "
        "the launcher and its options are written for you."
    )
