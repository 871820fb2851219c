"""Slurm: a script for sbatch. One task a machine; the task is torchrun, which starts that machine's ranks."""

from __future__ import annotations

import shlex

from course_tools.clusters.job import CPU, Job
from course_tools.clusters.launchers import program, torchrun
from course_tools.clusters.shell_script import exports, lines
from course_tools.clusters.texts import summary
from course_tools.clusters.words import Shell, line, lines_of

FILE = "job.sbatch"
OPTIONS = {
    "partition": "queue to wait in",
    "account": "who pays",
    "qos": "quality of service",
    "constraint": "features that the machines must have",
    "gres_type": "the cluster's own name of the card, as sinfo prints it after gpu:",
    "mem": "memory of each machine, 0 for all of it",
    "requeues": "how often the job may queue again when its time is over, 10 if not given",
}

# Before its time limit Slurm signals this script alone (B:). The script queues the job again, which ends the ranks
# with SIGTERM; the next attempt resumes from the last checkpoint. `wait` returns early when a signal comes, with 128
# and the signal's number: the step goes on then, and is waited for again.
AGAIN = """\
again() {
  if (( ${SLURM_RESTART_COUNT:-0} < REQUEUES )); then
    echo "NOTICE seconds of the time limit are left: queued again, to resume from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "time is nearly over, and the job has been queued again REQUEUES times: not again"
  fi
}
trap again USR1"""

WAIT = """\
step=$!
wait "$step" && code=0 || code=$?
if (( code == 128 + $(kill -l USR1) )); then
  wait "$step" && code=0 || code=$?
fi
exit "$code\""""

# `head` would close the pipe early and, with pipefail, end the script on a long list of machines
ENDPOINT = """\
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RDZV_ENDPOINT="$first:$(( 20000 + SLURM_JOB_ID % 10000 ))"  # two jobs on one machine do not meet"""


def files(job: Job, folder: str) -> dict[str, str]:
    """``job.sbatch``.

    Raises:
        ValueError: an image, which plain Slurm does not run; or `requeues` that is no number.
    """
    if job.image is not None:
        raise ValueError(f"image={job.image!r}: plain Slurm runs no containers; load the environment in setup=[...].")
    requeues = job.options.get("requeues", "10")
    if not requeues.isdecimal():
        raise ValueError(f"options['requeues']={requeues!r}: give a whole number of at least 0.")
    agent = torchrun(
        job,
        endpoint=Shell('"$RDZV_ENDPOINT"'),
        run_id=Shell('"$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'),
        started=program(job, job.config, job.output_dir),
    )
    text = lines(
        "#!/bin/bash",
        f"# {summary(job)}",
        f"# From the folder of the code: {command(job, folder)}",
        *(f"#SBATCH --{one}" for one in header(job)),
        "set -euo pipefail",
        exports(job),
        *job.setup,
        line(["mkdir", "-p", job.output_dir]),
        ENDPOINT,
        AGAIN.replace("REQUEUES", requeues).replace("NOTICE", str(job.notice)),
        "# srun has not taken over cpus-per-task since Slurm 22.05: left out, all ranks of a machine share one core",
        f"srun --cpus-per-task={job.cpus} --kill-on-bad-exit=1 \\\n  {lines_of(agent)} &",
        WAIT,
    )
    return {FILE: text}


def header(job: Job) -> list[str]:
    """What follows ``#SBATCH --``, one a line."""
    gres = job.options.get("gres_type", "")
    gpus = f"{gres}:{job.gpus_per_node}" if gres else str(job.gpus_per_node)
    asked = [
        f"job-name={job.name}",
        f"nodes={job.num_nodes}",
        "ntasks-per-node=1",
        *([] if job.gpu == CPU else [f"gpus-per-node={shlex.quote(gpus)}"]),
        f"cpus-per-task={job.cpus}",
        f"time={duration(job.seconds)}",
        f"signal=B:USR1@{job.notice}",
        "requeue",
        "open-mode=append",
        "output=%x-%j.out",
    ]
    chosen = [name for name in ("partition", "account", "qos", "constraint", "mem") if name in job.options]
    return asked + [f"{name}={shlex.quote(job.options[name])}" for name in chosen]


def duration(seconds: int) -> str:
    """As Slurm writes it, days-hours:minutes:seconds."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{seconds:02}"


def command(job: Job, folder: str) -> str:
    """What to type on the cluster's login machine."""
    return f"sbatch {shlex.quote(f'{folder}/{FILE}')}"
