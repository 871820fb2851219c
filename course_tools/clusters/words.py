"""Words of a shell line, and what may stand in a file that a shell, Slurm or Kubernetes reads."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CONTROL = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029]")
LOOKS_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)

# Set by torchrun on every rank, or by the scheduler on every machine. A value of ours would either be lost or, worse,
# be the same on every rank.
TAKEN = re.compile(
    r"RANK|LOCAL_RANK|GROUP_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|RDZV_ENDPOINT"
    r"|(PET|SLURM|SKYPILOT|AZUREML|TORCHELASTIC)_.*"
)


class Shell(str):
    """A word that the shell is to expand, such as ``"$MASTER_ADDR"``; every other word is quoted."""


def line(words: Iterable[str]) -> str:
    """One shell line, as bash reads it: plain words quoted where they need it."""
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


def lines_of(words: Iterable[str]) -> str:
    """The same line over several lines of a script, an option on each."""
    text = ""
    for word in words:
        apart = " \\\n  " if word.startswith("--") or word == "-m" else " "
        text += (apart if text else "") + line([word])
    return text


def option(flag: str, value: str) -> str:
    """``--flag=value``, still for the shell to expand where the value is."""
    return Shell(f"{flag}={value}") if isinstance(value, Shell) else f"{flag}={value}"


def filled(word: str, place: str, value: str) -> str:
    """`word` with `value` in the place of `place`; what stands around a value for the shell is quoted."""
    if place not in word or not isinstance(value, Shell):
        return word.replace(place, value)
    return Shell(value.join(shlex.quote(part) if part else "" for part in word.split(place)))


def one_line(**texts: Any) -> None:
    """Raises ValueError for what is no text of one line; its sentence names the setting."""
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{name}={text!r}: give a text that is not empty.")
        if CONTROL.search(text):
            raise ValueError(f"{name}={text!r}: leave out line breaks, tabs and other control characters.")


def port(options: Mapping[str, str]) -> str:
    """options['port'], torchrun's usual 29500 without one. Raises ValueError for what is no port."""
    given = options.get("port", "29500")
    if not given.isdecimal() or not 0 < int(given) < 65536:
        raise ValueError(f"options['port']={given!r}: give a number from 1 to 65535.")
    return given


def job_name(name: Any) -> None:
    """Raises ValueError for a name that one of the targets would refuse: Kubernetes is the strictest of them."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"name={name!r}: write 1 to 40 small letters, digits and dashes that begin with a letter and end with a "
            "letter or digit: Kubernetes takes no other name."
        )


def environment(env: Mapping[str, str], secrets: Iterable[str]) -> None:
    """Raises ValueError for variables that cannot be set, that a launcher sets, or that would put a secret in a file."""
    if not isinstance(env, Mapping):
        raise ValueError(f"env={env!r}: give a dict of names and texts, such as {{'NCCL_DEBUG': 'INFO'}}.")
    secrets = list(secrets)
    for name in [*env, *secrets]:
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable: letters, digits and _, no digit first.")
        if TAKEN.fullmatch(name):
            raise ValueError(f"env[{name!r}] is set by the launcher, to another value on each machine: leave it out.")
    for name, value in env.items():
        if name in secrets or LOOKS_SECRET.search(name):
            raise ValueError(
                f"env[{name!r}] would write a secret into a file: name it in secrets=[{name!r}] instead, and its value "
                "stays in your environment."
            )
        if not isinstance(value, str) or CONTROL.search(value):
            raise ValueError(f"env[{name!r}]={value!r}: give a text of one line.")
