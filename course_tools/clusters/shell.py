"""Shell words, quoted unless the shell is to expand them, and the lines of a script that several targets share."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import jinja2

from course_tools.clusters.job import Job


class Shell(str):
    """A word that the shell is to expand, such as ``"$MASTER_ADDR"``; every other word is quoted."""


def quoted(words: Iterable[str]) -> str:
    """Join words into one shell line."""
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in words)


def wrapped(words: Iterable[str]) -> str:
    """Join words into one shell command that is written over several lines, an option on each."""
    text = ""
    for word in words:
        separator = " \\\n  " if word.startswith("--") or word == "-m" else " "
        text += (separator if text else "") + quoted([word])
    return text


def option(flag: str, value: str) -> str:
    """Return ``--flag=value``, which the shell expands if it expands the value."""
    return Shell(f"{flag}={value}") if isinstance(value, Shell) else f"{flag}={value}"


def substitute(word: str, placeholder: str, value: str) -> str:
    """Put `value` in the place of `placeholder`; the text around a value that the shell expands is quoted."""
    if placeholder not in word or not isinstance(value, Shell):
        return word.replace(placeholder, value)
    return Shell(value.join(shlex.quote(part) if part else "" for part in word.split(placeholder)))


def script(*lines: str) -> str:
    """Join lines into a script; empty ones are left out."""
    return "\n".join(line for line in lines if line) + "\n"


def exports(job: Job) -> str:
    """Export the environment of the ranks; a missing secret is noticed before the training starts."""
    exported = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    needed = [f': "${{{name}:?export {name} first: its value stands in no file}}"' for name in job.secrets]
    return "\n".join([*exported, *needed])


def render(template: str, **values: Any) -> str:
    """Fill in a jinja2 template of a script; ``{{ words | quoted }}`` and ``{{ words | wrapped }}`` write shell words."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quoted": quoted, "wrapped": wrapped, "quote": shlex.quote, "exports": exports}
    return environment.from_string(template).render(values)
