"""One run, described once: what to train, on how many machines with how many GPUs, and what to do when it breaks."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from course_lib.memory.cards import CARDS, card
from course_tools.clusters import words

CPU = "cpu"  # instead of a card: ranks on CPU over gloo


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run that any of the targets can be asked for. Give `config` or `command`, not both.

    Attributes:
        name: of the job on the cluster: small letters, digits, dashes.
        config: an Axolotl YAML; the launch files train it, resume it and send its output to `output_dir`.
        command: what torchrun is to start, ``"-m course_lib.training.data_parallel.ddp --steps 20"`` or ``"train.py --lr 1e-4"``, as
            one line or as a list of words; ``{output_dir}`` in it becomes the output folder.
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

    Raises:
        ValueError: one sentence on the first setting that means nothing.
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
        words.job_name(self.name)
        if self.gpus_per_node is None:
            raise ValueError("gpus_per_node is missing: say how many GPUs each machine has, for one rank runs on each.")
        counts = ("num_nodes", "gpus_per_node", "cpus_per_gpu")
        for name, least in [*((name, 1) for name in counts), ("max_restarts", 0), ("notice", 0)]:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
        if isinstance(self.hours, bool) or not isinstance(self.hours, int | float) or not 0 < self.hours < math.inf:
            raise ValueError(f"hours={self.hours!r}: give a number above 0.")
        if self.seconds <= 2 * self.notice:
            raise ValueError(
                f"notice={self.notice} seconds is half of hours={self.hours:g} or more: ask for more hours."
            )
        self._check_gpu()
        for name in ("secrets", "setup"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: give a list of texts.")
        for number, text in enumerate(self.setup):
            words.one_line(**{f"setup[{number}]": text})
        words.environment(self.env, self.secrets)
        words.one_line(code=self.code)
        if self.image is not None:
            words.one_line(image=self.image)
            if " " in self.image:
                raise ValueError(f"image={self.image!r}: an image's name has no spaces in it.")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options={self.options!r}: give a dict of texts, such as {{'partition': 'gpu'}}.")
        words.one_line(**{f"options[{name!r}]": text for name, text in self.options.items()})
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
        inside = {}
        if self.config is not None:
            inside = _read(self.config)
        else:
            object.__setattr__(self, "command", tuple(_program(self.command)))
        output_dir = self.output_dir or inside.get("output_dir") or f"runs/{self.name}"
        words.one_line(output_dir=output_dir)
        object.__setattr__(self, "output_dir", output_dir)

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
    def variables(self) -> dict[str, str]:
        """The environment of every rank, secrets left out."""
        # NCCL says nothing of its own when a link breaks; WARN is one line in a healthy run
        # SHARE: the ranks of a second attempt would meet in the first one's store, read its addresses there and hang;
        # github.com/pytorch/pytorch/issues/135712, and seen with torch 2.13 over two agents. Now each makes a new one
        usual = {"NCCL_DEBUG": "WARN", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.gpu == CPU else {}  # or ranks on CPU would find a GPU after all
        return usual | hidden | dict(self.env)


def _read(config: Any) -> dict[str, Any]:
    """What an Axolotl YAML says, which is checked no further here: `beyond check` does that."""
    words.one_line(config=config)
    path = Path(config)
    if not path.is_file():
        raise ValueError(f"config={config!r}: there is no such file here.")
    try:
        inside = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"config={config!r}, {where}this is no YAML: {getattr(error, 'problem', error)}.") from error
    if not isinstance(inside, dict):
        raise ValueError(f"config={config!r}: an Axolotl YAML is made of lines such as 'base_model: NAME'.")
    return inside


def _program(command: Any) -> list[str]:
    """The words after torchrun's own options: ``-m module …`` or ``script.py …``."""
    if isinstance(command, str):
        words.one_line(command=command)
        try:
            program = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"command={command!r}: a quotation mark is not closed.") from error
    else:
        program = list(command)
        for number, word in enumerate(program):
            if not isinstance(word, str) or words.CONTROL.search(word):
                raise ValueError(f"command[{number}]={word!r}: give texts of one line.")
    if program[:1] == ["torchrun"]:
        program = program[1:]
    if program[:1] == ["-m"] and len(program) > 1 and all(part.isidentifier() for part in program[1].split(".")):
        return program
    if program and program[0].endswith(".py") and not program[0].startswith("-"):
        return program
    raise ValueError(
        f"command={command!r}: write what torchrun starts, '-m module …' or 'script.py …'; "
        "the launcher and its options are written for you."
    )
