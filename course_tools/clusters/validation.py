"""What may stand in a file that a shell, Slurm or Kubernetes reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029]")
LOOKS_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)

# Set by torchrun on every rank, or by the scheduler on every machine. A value of ours would either be lost or, worse,
# be the same on every rank.
SET_BY_LAUNCHERS = re.compile(
    r"RANK|LOCAL_RANK|GROUP_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|RDZV_ENDPOINT"
    r"|(PET|SLURM|SKYPILOT|AZUREML|TORCHELASTIC)_.*"
)


def check_line(**texts: Any) -> None:
    """Check that each setting is a text of one line, and not empty. Raises ValueError."""
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{name}={text!r}: give a text that is not empty.")
        if CONTROL_CHARACTER.search(text):
            raise ValueError(f"{name}={text!r}: leave out line breaks, tabs and other control characters.")


def check_job_name(name: Any) -> None:
    """Raise ValueError for a name that one of the targets would refuse: Kubernetes is the strictest of them."""
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        raise ValueError(
            f"name={name!r}: write 1 to 40 small letters, digits and dashes that begin with a letter and end with a "
            "letter or digit: Kubernetes takes no other name."
        )


def check_environment(env: Mapping[str, str], secrets: Iterable[str]) -> None:
    """Raise ValueError for a variable that cannot be set, that a launcher sets, or that puts a secret into a file."""
    if not isinstance(env, Mapping):
        raise ValueError(f"env={env!r}: give a dict of names and texts, such as {{'NCCL_DEBUG': 'INFO'}}.")
    for name in [*env, *secrets]:
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable: letters, digits and _, no digit first.")
        if SET_BY_LAUNCHERS.fullmatch(name):
            raise ValueError(f"env[{name!r}] is set by the launcher, to another value on each machine: leave it out.")
    for name, value in env.items():
        if name in secrets or LOOKS_SECRET.search(name):
            raise ValueError(
                f"env[{name!r}] would write a secret into a file: name it in secrets=[{name!r}] instead, and its value "
                "stays in your environment."
            )
        if not isinstance(value, str) or CONTROL_CHARACTER.search(value):
            raise ValueError(f"env[{name!r}]={value!r}: give a text of one line.")


def port(options: Mapping[str, str]) -> str:
    """Return options['port'], torchrun's usual 29500 without one. Raises ValueError for what is no port."""
    number = options.get("port", "29500")
    if not number.isdecimal() or not 0 < int(number) < 65536:
        raise ValueError(f"options['port']={number!r}: give a number from 1 to 65535.")
    return number
