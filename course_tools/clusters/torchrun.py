"""Machines that you reach yourself: one script, typed on each of them."""

from __future__ import annotations

import shlex

from course_tools.clusters.job import Job
from course_tools.clusters.launchers import torchrun
from course_tools.clusters.shell import Shell, render
from course_tools.clusters.validation import port

FILE = "launch.sh"
OPTIONS = {"head": "name or address of the first machine", "port": "free port on it, 29500 if not given"}
SCRIPT = """\
#!/usr/bin/env bash
# {{ job.summary }}
# On each of the {{ job.num_nodes }} machines, in the folder of the code: {{ command }}
# The first machine's address is the same everywhere; the output folder must be on storage that all of them share.
set -euo pipefail
export RDZV_ENDPOINT="${1:?give HOST:PORT of the first machine, the same on every machine}"
{{ job | exports }}
{% for line in job.setup %}
{{ line }}
{% endfor %}
{{ ["mkdir", "-p", job.output_dir] | quoted }}
exec {{ agent | wrapped }}
"""


def files(job: Job, folder: str) -> dict[str, str]:
    """Write ``launch.sh``, the same on every machine; they find each other at the first one's address."""
    if job.image is not None:
        raise ValueError(
            f"image={job.image!r}: this script starts no container; type it inside one, or use setup=[...]."
        )
    agent = torchrun(job, endpoint=Shell('"$RDZV_ENDPOINT"'), config=job.config, output_dir=job.output_dir)
    return {FILE: render(SCRIPT, job=job, agent=agent, command=command(job, folder))}


def command(job: Job, folder: str) -> str:
    """Return what to type on every machine."""
    head = job.options.get("head", "FIRST_MACHINE" if job.num_nodes > 1 else "localhost")
    return f"bash {shlex.quote(f'{folder}/{FILE}')} {shlex.quote(head)}:{port(job.options)}"
