"""Slurm: a script for sbatch. One task per machine; the task is torchrun, which starts that machine's ranks.

Before its time limit Slurm signals this script alone (B:). The script sends SIGTERM to the step: each machine's torchrun
hands it on to its ranks, and gives them `Job.shutdown_timeout` seconds. Only when the step is over is the job queued
again, for `scontrol requeue` ends whatever still runs. A program that does not handle SIGTERM saves nothing then, and the
next attempt resumes from the last checkpoint that it wrote before; `course_tools.axolotl.save_on_sigterm` handles it.

A torchrun that SIGTERM ended returns 1 even if its ranks returned 0, and --kill-on-bad-exit then ends the other machines:
so the ranks must leave together, when the checkpoint is whole.
"""

from __future__ import annotations

import shlex

from course_tools.clusters.job import CPU, Job
from course_tools.clusters.launchers import torchrun
from course_tools.clusters.shell import Shell, render

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
# `head` would close the pipe early and, with pipefail, end the script on a long list of machines: hence `read`
SCRIPT = """\
#!/bin/bash
# {{ job.summary }}
# From the folder of the code: {{ command }}
#SBATCH --job-name={{ job.name }}
#SBATCH --nodes={{ job.num_nodes }}
#SBATCH --ntasks-per-node=1
{% if gpus %}
#SBATCH --gpus-per-node={{ gpus | quote }}
{% endif %}
#SBATCH --cpus-per-task={{ job.cpus }}
#SBATCH --time={{ time }}
#SBATCH --signal=B:USR1@{{ job.notice }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
{% for name in ("partition", "account", "qos", "constraint", "mem") if name in job.options %}
#SBATCH --{{ name }}={{ job.options[name] | quote }}
{% endfor %}
set -euo pipefail
{{ job | exports }}
{% for line in job.setup %}
{{ line }}
{% endfor %}
{{ ["mkdir", "-p", job.output_dir] | quoted }}
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RDZV_ENDPOINT="$first:$(( 20000 + SLURM_JOB_ID % 10000 ))"  # two jobs on one machine do not meet
noticed=0
notice() {
  noticed=1
  echo "{{ job.notice }} seconds of the time limit are left: the ranks are asked to save and to leave"
  scancel --signal=TERM "$SLURM_JOB_ID"  # reaches the job's steps, not this script
}
trap notice USR1
# srun has not taken over cpus-per-task since Slurm 22.05: left out, all ranks of a machine share one core
srun --cpus-per-task={{ job.cpus }} --kill-on-bad-exit=1 \\
  {{ agent | wrapped }} &
step=$!
wait "$step" && code=0 || code=$?
if (( code == 128 + $(kill -l USR1) )); then  # the signal ended `wait`, and the step is still saving
  wait "$step" && code=0 || code=$?
fi
if (( noticed && code != 0 )); then  # 0: the training came to its end after all
  if (( ${SLURM_RESTART_COUNT:-0} < {{ requeues }} )); then
    echo "queued again, to resume from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "the job has been queued again {{ requeues }} times: not again"
  fi
fi
exit "$code"
"""


def files(job: Job, folder: str) -> dict[str, str]:
    """Write ``job.sbatch``."""
    if job.image is not None:
        raise ValueError(f"image={job.image!r}: plain Slurm runs no containers; load the environment in setup=[...].")
    requeues = job.options.get("requeues", "10")
    if not requeues.isdecimal():
        raise ValueError(f"options['requeues']={requeues!r}: give a whole number of at least 0.")
    agent = torchrun(
        job,
        endpoint=Shell('"$RDZV_ENDPOINT"'),
        run_id=Shell('"$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'),
        config=job.config,
        output_dir=job.output_dir,
    )
    gpus = "" if job.gpu == CPU else ":".join([*filter(None, [job.options.get("gres_type")]), str(job.gpus_per_node)])
    values = {"command": command(job, folder), "time": duration(job.seconds), "gpus": gpus, "requeues": requeues}
    return {FILE: render(SCRIPT, job=job, agent=agent, **values)}


def duration(seconds: int) -> str:
    """Write a time as Slurm does, days-hours:minutes:seconds."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{seconds:02}"


def command(job: Job, folder: str) -> str:
    """Return what to type on the cluster's login machine."""
    return f"sbatch {shlex.quote(f'{folder}/{FILE}')}"
