"""From one job to the files of one target, and the one command that starts it."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from course_lib.validation import pick
from course_tools.clusters import azureml, kubernetes, skypilot, slurm, torchrun
from course_tools.clusters.job import Job
from course_tools.clusters.validation import check_line

_MODULES = {module.__name__.rpartition(".")[2]: module for module in (torchrun, slurm, kubernetes, azureml, skypilot)}
TARGETS = tuple(_MODULES)


class Written(NamedTuple):
    """The files that `write` wrote, and what to type from the folder in which it was called."""

    files: list[Path]
    command: str


def options_of(target: str) -> dict[str, str]:
    """Return the options of a target and what each is for."""
    pick("target", target, TARGETS)
    return dict(_MODULES[target].OPTIONS)


def launch_files(job: Job, target: str, folder: str | os.PathLike[str] = ".") -> dict[str, str]:
    """Return the files that start `job` on `target`, as file name to text; nothing is written or started.

    Args:
        job: the run.
        target: one of `TARGETS`.
        folder: where the files will lie, as seen from the folder of the code: some of them name it.
    """
    return _module(job, target).files(job, _folder_text(folder))


def start_command(job: Job, target: str, folder: str | os.PathLike[str] = ".") -> str:
    """Return what to type, once the files lie in `folder`. Raises ValueError as `launch_files`."""
    return _module(job, target).command(job, _folder_text(folder))


def write(job: Job, target: str, folder: str | os.PathLike[str]) -> Written:
    """Write the files into `folder`, which is made if need be."""
    files = {Path(folder) / name: text for name, text in launch_files(job, target, folder).items()}
    if Path(folder).is_file():
        raise ValueError(f"folder={str(folder)!r} is a file: name a folder for the launch files.")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return Written(list(files), start_command(job, target, folder))


def _module(job: Any, target: str) -> ModuleType:
    if not isinstance(job, Job):
        raise ValueError(f"job={job!r}: give a Job.")
    pick("target", target, TARGETS)
    for name in job.options:
        pick(f"options of {target}", name, tuple(_MODULES[target].OPTIONS))
    return _MODULES[target]


def _folder_text(folder: str | os.PathLike[str]) -> str:
    text = os.fspath(folder)
    check_line(folder=text)
    return text.rstrip("/") or text
