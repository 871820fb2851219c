"""Azure ML: a command job. `az ml job create` sends the code and runs one launcher on each machine.

With ``distribution: pytorch`` Azure ML sets MASTER_ADDR, MASTER_PORT and NODE_RANK on every machine. Schema:
https://azuremlschemas.azureedge.net/latest/commandJob.schema.json
"""

from __future__ import annotations

import os
import shlex
from typing import Any

from course_tools.clusters.job import CPU, Job
from course_tools.clusters.launchers import is_host, torchrun
from course_tools.clusters.shell import Shell, script, wrapped
from course_tools.clusters.yaml_writer import to_yaml

FILE = "job.yml"
SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
OUTPUT = Shell('"${{outputs.run}}"')  # Azure ML puts the mounted folder here
OPTIONS = {
    "compute": "name of a cluster in your workspace; without it the machines are rented for this job (serverless)",
    "instance_type": "the machine's size, where Azure has several with these cards",
    "experiment": "what the job is filed under, its name if not given",
    "datastore": "where output_dir lies, workspaceblobstore if not given",
    "shm_size": "shared memory for NCCL and data loaders, 64g if not given",
}

# Microsoft's list of GPU sizes by card and number of cards: https://learn.microsoft.com/azure/virtual-machines/sizes
SIZES = {
    ("t4", 1): "Standard_NC4as_T4_v3",
    ("t4", 4): "Standard_NC64as_T4_v3",
    ("v100-16gb", 1): "Standard_NC6s_v3",
    ("v100-16gb", 2): "Standard_NC12s_v3",
    ("v100-16gb", 4): "Standard_NC24rs_v3",
    ("v100-32gb", 8): "Standard_ND40rs_v2",
    ("a100-40gb", 8): "Standard_ND96asr_v4",
    ("a100-80gb", 1): "Standard_NC24ads_A100_v4",
    ("a100-80gb", 2): "Standard_NC48ads_A100_v4",
    ("a100-80gb", 4): "Standard_NC96ads_A100_v4",
    ("a100-80gb", 8): "Standard_ND96amsr_A100_v4",
    ("h100-80gb", 8): "Standard_ND96isr_H100_v5",
    ("h200", 8): "Standard_ND96isr_H200_v5",
}


def files(job: Job, folder: str) -> dict[str, str]:
    """Write ``job.yml``."""
    return {FILE: to_yaml(command_job(job, folder), f"{job.summary}\n{command(job, folder)}")}


def command_job(job: Job, folder: str) -> dict[str, Any]:
    """Return the job as Azure ML's command-line tool reads it."""
    if job.image is None:
        raise ValueError("image is missing: name the container image that Azure ML is to run.")
    refuse_expressions(job)
    endpoint = Shell('"$MASTER_ADDR:$MASTER_PORT"')
    agent = torchrun(job, endpoint=endpoint, ranked=True, config=job.config_in_code, output_dir=OUTPUT)
    needed = [f': "${{{name}:?was not given to az ml job create}}"' for name in job.secrets]
    datastore = job.options.get("datastore", "workspaceblobstore")
    resources = {"instance_count": job.num_nodes, "shm_size": job.options.get("shm_size", "64g")}
    result: dict[str, Any] = {
        "$schema": SCHEMA,
        "type": "command",
        "display_name": job.name,
        "experiment_name": job.options.get("experiment", job.name),
        "code": os.path.relpath(job.code, folder),  # as seen from this file
        "environment": {"image": job.image},
        "environment_variables": job.variables,
        "command": script("set -eu", *needed, *job.setup, is_host("NODE_RANK"), wrapped(agent)),
        # One process per machine, and that process is the launcher; with 8 here Azure ML would start 8 launchers
        "distribution": {"type": "pytorch", "process_count_per_instance": 1},
        # A fixed place: a job that is created again finds the checkpoints of the one before
        "outputs": {
            "run": {
                "type": "uri_folder",
                "mode": "rw_mount",
                "path": f"azureml://datastores/{datastore}/paths/{job.output_dir.strip('/')}",
            }
        },
        "limits": {"timeout": job.seconds},
    }
    if "compute" in job.options:
        return result | {"compute": f"azureml:{job.options['compute']}", "resources": resources}
    return result | {"resources": {"instance_type": size(job)} | resources}


def refuse_expressions(job: Job) -> None:
    """Raise ValueError where Azure ML would read a part of the job's own text as an expression of its own."""
    for text in [*(job.command or ()), *job.setup, *job.variables.values(), job.output_dir]:
        if "${{" in text:
            raise ValueError(
                f"{text!r}: Azure ML replaces what stands in ${{{{ }}}} by values of its own: leave it out."
            )


def size(job: Job) -> str:
    """Return the machine that has these cards in this number."""
    if "instance_type" in job.options:
        return job.options["instance_type"]
    if (job.gpu, job.gpus_per_node) in SIZES:
        return SIZES[job.gpu, job.gpus_per_node]
    counts = [str(count) for gpu, count in SIZES if gpu == job.gpu]
    known = f"Azure's machines come with {' or '.join(counts)} of them" if counts else "no machine is known with them"
    what = "ranks on CPU" if job.gpu == CPU else f"{job.gpus_per_node} x {job.gpu}"
    raise ValueError(f"{what}: {known}; name another in options['instance_type'], or a cluster in 'compute'.")


def command(job: Job, folder: str) -> str:
    """Return what to type where `az` is logged in; the values of secrets go into the job's record, not into a file."""
    secrets = "".join(f' --set environment_variables.{name}="${name}"' for name in job.secrets)
    return f"az ml job create --file {shlex.quote(f'{folder}/{FILE}')}{secrets}"
