"""One run, described once: what to train, on how many machines with how many GPUs, and what to do when it breaks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from course_lib.memory.cards import CARDS, card
from course_lib.validation import check_counts, positive
from course_tools.axolotl.check.document import loaded, text_of

TO_LEAVE = 20  # seconds of a notice that are kept for what follows the ranks: torchrun's own end, and queueing again

JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # Kubernetes is the strictest of the targets
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LOOKS_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
# Set by torchrun on every rank, or by the scheduler on every machine: a value from us would be the same on all of them
SET_BY_LAUNCHERS = re.compile(
    r"RANK|LOCAL_RANK|GROUP_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|RDZV_ENDPOINT"
    r"|(PET|SLURM|SKYPILOT|AZUREML|TORCHELASTIC)_.*"
)

# Why the launch files set a variable that nobody asked for
WHY = {
    "NCCL_DEBUG": "otherwise NCCL says nothing when a link breaks",
    "PYTHONUNBUFFERED": "a line is in the log as soon as it is printed",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "otherwise a second attempt hangs: pytorch#135712",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "seconds for the ranks to save after SIGTERM; torchrun would give them 30",
    "CUDA_VISIBLE_DEVICES": "otherwise ranks on CPU might find a GPU",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run that any of the targets can be asked for. Give `config` or `command`, not both."""

    name: str  # on the cluster: small letters, digits, dashes
    config: str | None = None  # an Axolotl YAML: it is trained, resumed, and its output goes to `output_dir`
    # What torchrun is to start: "-m my_package.train --steps 20" or "train.py --lr 1e-4", as one line or as a list of
    # words; {output_dir} in it becomes the output folder
    command: str | Sequence[str] | None = None
    num_nodes: int = 1  # machines
    gpus_per_node: int | None = None  # GPUs, and so ranks, of each machine
    gpu: str = "a100-80gb"  # a card of `course_lib.memory.cards`, or "cpu": no GPU asked for, ranks on CPU over gloo
    cpus_per_gpu: int = 8  # CPU cores for each rank: one for itself, the others for its data loader's workers
    hours: float = 24  # limit of one attempt, enforced by Slurm, Kubernetes and Azure ML
    image: str | None = None  # container image; Kubernetes and Azure ML need one, SkyPilot takes one
    env: Mapping[str, str] = field(default_factory=dict)  # environment of every rank, besides what `variables` adds
    secrets: Sequence[str] = ()  # variables whose values stay in your environment, or in the cluster's store of secrets
    setup: Sequence[str] = ()  # shell lines to run first on every machine, such as "source .venv/bin/activate"
    # For checkpoints and results; the same storage on every machine and in every attempt. By default the config's own
    # output_dir, or else runs/NAME
    output_dir: str | None = None
    max_restarts: int = 3  # how often torchrun, and the scheduler where it can, may start again after a failure
    notice: int = 120  # seconds of warning before a time limit or a preemption ends the run
    code: str = "."  # the folder that Azure ML and SkyPilot send along, and which holds `config`
    options: Mapping[str, str] = field(default_factory=dict)  # of one target only: `course_tools.clusters.options_of`

    def __post_init__(self) -> None:
        if not JOB_NAME.fullmatch(self.name):
            raise ValueError(
                f"name={self.name!r}: write 1 to 40 small letters, digits and dashes that begin with a letter and end "
                "with a letter or digit: Kubernetes takes no other name."
            )
        if self.gpus_per_node is None:
            raise ValueError("gpus_per_node is missing: say how many GPUs each machine has, for one rank runs on each.")
        check_counts(num_nodes=self.num_nodes, gpus_per_node=self.gpus_per_node, cpus_per_gpu=self.cpus_per_gpu)
        positive(hours=self.hours)
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts}: give a whole number of at least 0.")
        if not 0 <= 2 * self.notice < self.seconds:
            raise ValueError(f"notice={self.notice}: give 0 or more seconds, less than half of hours={self.hours:g}.")
        if not self.on_cpu:
            if card(self.gpu).name not in CARDS:
                raise ValueError(
                    f"gpu={self.gpu!r} is an amount of memory: name the card to rent, such as 'a100-80gb'."
                )
            object.__setattr__(self, "gpu", card(self.gpu).name)
        self._check_environment()
        if isinstance(self.setup, str):
            raise ValueError(f"setup={self.setup!r}: give a list of lines.")
        _check_lines({f"setup[{number}]": line for number, line in enumerate(self.setup)})
        _check_lines({f"options[{name!r}]": text for name, text in self.options.items()})
        _check_lines({"code": self.code} | ({"image": self.image} if self.image is not None else {}))
        self._settle_program()

    def _check_environment(self) -> None:
        if isinstance(self.secrets, str):
            raise ValueError(f"secrets={self.secrets!r}: give a list of names.")
        for name in [*self.env, *self.secrets]:
            if not VARIABLE.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no name of an environment variable: letters, digits and _, no digit first."
                )
            if SET_BY_LAUNCHERS.fullmatch(name):
                raise ValueError(f"{name} is set by the launcher, to another value on each machine: leave it out.")
        for name, value in self.env.items():
            if name in self.secrets or LOOKS_SECRET.search(name):
                raise ValueError(
                    f"env[{name!r}] would write a secret into a file: name it in secrets=[{name!r}] instead, and its "
                    "value stays in your environment."
                )
            if value != "":
                _check_lines({f"env[{name!r}]": value})

    def _settle_program(self) -> None:
        """Take apart the command, and find out where the output goes."""
        if (self.config is None) == (self.command is None):
            raise ValueError("Give either config=, an Axolotl YAML, or command=, what torchrun is to start.")
        output_dir = self.output_dir or f"runs/{self.name}"
        if self.command is not None:
            object.__setattr__(self, "command", tuple(_words(self.command)))
        else:
            _check_lines({"config": self.config})
            settings = loaded(text_of(self.config), self.config)  # what they mean is a matter for `beyond check`
            if settings is None:
                raise ValueError(f"{self.config} is empty: a run needs an Axolotl YAML.")
            output_dir = self.output_dir or settings.get("output_dir") or output_dir
        _check_lines({"output_dir": output_dir})
        object.__setattr__(self, "output_dir", output_dir)

    @property
    def on_cpu(self) -> bool:
        """No GPU is asked for."""
        return self.gpu == "cpu"

    @property
    def summary(self) -> str:
        """The job in one line, for the top of each file."""
        what = self.config or " ".join(self.command)
        ranks = self.num_nodes * self.gpus_per_node
        where = "CPU" if self.on_cpu else self.gpu
        return f"{self.name}: {what}, {self.num_nodes} x {self.gpus_per_node} = {ranks} ranks on {where}"

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
        """The environment of every rank, secrets left out; `WHY` says what the first ones are for."""
        result = {"NCCL_DEBUG": "WARN", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        # Not torchrun's option --shutdown-timeout, which PyTorch before 2.12 refuses (it always gives 30 seconds)
        result["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(1, self.notice - TO_LEAVE))
        if self.on_cpu:
            result["CUDA_VISIBLE_DEVICES"] = ""
        return result | dict(self.env)


def _check_lines(texts: Mapping[str, Any]) -> None:
    """Raise ValueError for what is not one line of text: a line break would begin a new line of the file."""
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip() or not text.isprintable():
            raise ValueError(f"{name}={text!r}: give one line of text, without tabs and other control characters.")


def _words(command: str | Sequence[str]) -> list[str]:
    """Return the words after torchrun's own options: ``-m module …`` or ``script.py …``."""
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ValueError(f"command={command!r}: a quotation mark is not closed.") from error
    _check_lines({f"command[{number}]": word for number, word in enumerate(words) if word != ""})
    if words[:1] == ["torchrun"]:
        words = words[1:]
    starts_module = words[:1] == ["-m"] and len(words) > 1
    if not starts_module and not (words and words[0].endswith(".py") and not words[0].startswith("-")):
        raise ValueError(
            f"command={command!r}: write what torchrun starts, '-m module …' or 'script.py …'; "
            "the launcher and its options are written for you."
        )
    return words
