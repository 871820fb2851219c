"""What the scripts for bash have in common."""

from __future__ import annotations

import shlex

from course_tools.clusters.job import Job


def lines(*parts: str) -> str:
    """A script of these lines; empty parts are left out."""
    return "\n".join(part for part in parts if part) + "\n"


def exports(job: Job) -> str:
    """The environment of the ranks; a secret is only asked for, so that its absence is noticed before the training."""
    given = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    asked = [f': "${{{name}:?export {name} first: its value stands in no file}}"' for name in job.secrets]
    return "\n".join([*given, *asked])
