"""YAML for people to read: keys in their order, scripts as blocks, a comment on top."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from course_tools.clusters.job import Job

WIDTH = 110


class _Dumper(yaml.SafeDumper):
    """Lists indented under their key, as Kubernetes' documentation has them; no anchors."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(values: dict[str, Any], comment: str = "") -> str:
    """One YAML document with a comment above it."""
    above = "".join(f"# {text}\n" if text else "#\n" for text in comment.splitlines())
    return above + yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)


def summary(job: Job) -> str:
    """The job in one line, for the top of each file."""
    what = job.config if job.config is not None else " ".join(job.command)
    where = "on CPU" if job.gpu == "cpu" else f"on {job.gpu}"
    return f"{job.name}: {what}, {job.num_nodes} x {job.gpus_per_node} = {job.world_size} ranks {where}"


def sent_config(job: Job) -> str | None:
    """Where the config lies inside the folder `job.code`, which is sent to the machines.

    Raises:
        ValueError: it lies outside; no machine could read it.
    """
    if job.config is None:
        return None
    inside = Path(os.path.relpath(job.config, job.code))
    if inside.is_absolute() or ".." in inside.parts:
        raise ValueError(f"config={job.config!r} lies outside code={job.code!r}, so no machine would receive it.")
    return str(PurePosixPath(*inside.parts))
