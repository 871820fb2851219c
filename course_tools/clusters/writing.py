"""From one job to the file of one target, and the command that starts it.

Each file is a Jinja2 template in templates/, which reads like the file itself.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import jinja2
import yaml

from course_lib.validation import pick
from course_tools.clusters.job import WHY, Job
from course_tools.clusters.targets import TARGETS


def options_of(target: str) -> dict[str, str]:
    """Return the options of a target and what each is for."""
    pick("target", target, tuple(TARGETS))
    return TARGETS[target].options


def launch_files(job: Job, target: str, folder: str | os.PathLike[str] = ".") -> dict[str, str]:
    """Return the file that starts `job` on `target`, as name to text; nothing is written or started.

    Args:
        job: the run.
        target: one of `TARGETS`.
        folder: where the file will lie, as seen from the folder of the code: its comments name it.
    """
    values = _values(job, target, folder)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": shlex.quote, "yaml": _yaml, "unexpanded": _unexpanded, "why": _why}
    name = TARGETS[target].file
    return {name: environment.get_template(f"{name}.j2").render(job=job, options=job.options, **values)}


def start_command(job: Job, target: str, folder: str | os.PathLike[str] = ".") -> str:
    """Return what to type, once the file lies in `folder`. Raises ValueError as `launch_files`."""
    return _values(job, target, folder)["start"]


def _values(job: Job, target: str, folder: str | os.PathLike[str]) -> dict[str, object]:
    options = options_of(target)
    for name in job.options:
        pick(f"options of {target}", name, tuple(options))
    path = os.path.join(folder, TARGETS[target].file)
    return TARGETS[target].values(job, os.fspath(folder), shlex.quote(path))


def _yaml(text: str) -> str:
    """Write a text in YAML, in quotation marks where some reader might see no text: 1e-5 is a number to Kubernetes."""
    plain = re.fullmatch(r"[A-Za-z/][-\w./:@]+", text) and yaml.safe_load(text) == text
    return text if plain else json.dumps(text, ensure_ascii=False)


def _unexpanded(text: str) -> str:
    """Escape text for env and args of a pod, where Kubernetes expands $(NAME) and reads $$ as one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _why(variable: str) -> str:
    """Return the comment behind a variable that the launch files set on their own."""
    return f"  # {WHY[variable]}" if variable in WHY else ""
