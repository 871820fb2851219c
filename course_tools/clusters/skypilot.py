"""SkyPilot: a task that it runs on whichever cloud has the cards, and starts again when a machine is taken away.

https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

from __future__ import annotations

import shlex
from typing import Any

from course_tools.clusters.job import CPU, Job
from course_tools.clusters.launchers import machine_script
from course_tools.clusters.validation import port
from course_tools.clusters.yaml_writer import to_yaml

FILE = "task.yaml"
MOUNT = "/mnt/training"
OPTIONS = {
    "bucket": "what holds the output of every attempt, such as s3://my-bucket; needed",
    "infra": "where to rent, such as aws, gcp/us-central1 or k8s; the cheapest if not given",
    "use_spot": "yes: machines that may be taken away, for less money",
    "port": "free port on the first machine, 29500 if not given",
}

# SkyPilot's names of the cards, as `sky gpus list` (formerly show-gpus) prints them
ACCELERATORS = {
    "t4": "T4",
    "v100-16gb": "V100",
    "v100-32gb": "V100-32GB",
    "rtx3090": "RTX3090",
    "rtx4090": "RTX4090",
    "rtx5090": "RTX5090",
    "l4": "L4",
    "a10g": "A10G",
    "l40s": "L40S",
    "a6000": "RTXA6000",
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "h100-80gb": "H100",
    "h200": "H200",
    "b200": "B200",
}


def files(job: Job, folder: str) -> dict[str, str]:
    """Write ``task.yaml``."""
    return {FILE: to_yaml(task(job), f"{job.summary}\n{command(job, folder)}")}


def task(job: Job) -> dict[str, Any]:
    """Return the task as SkyPilot reads it."""
    if "bucket" not in job.options:
        raise ValueError("options['bucket'] is missing: name the storage that outlives a machine, such as s3://mine.")
    spot = job.options.get("use_spot", "no").lower()
    if spot not in ("yes", "no"):
        raise ValueError(f"options['use_spot']={spot!r}: say yes or no.")
    resources: dict[str, Any] = {"infra": job.options["infra"]} if "infra" in job.options else {}
    resources["cpus"] = f"{job.cpus}+"
    if job.gpu != CPU:
        resources["accelerators"] = f"{ACCELERATORS[job.gpu]}:{job.gpus_per_node}"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    if job.num_nodes > 1 and job.gpu != CPU:
        resources["network_tier"] = "best"
    resources["use_spot"] = spot == "yes"
    resources["job_recovery"] = {"max_restarts_on_errors": job.max_restarts}
    result: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.num_nodes,
        "workdir": job.code,  # sent along; as seen from where sky is typed
        "resources": resources,
        # MOUNT writes through: a cached mode would still be uploading when a spot machine goes away
        "file_mounts": {MOUNT: {"source": job.options["bucket"], "mode": "MOUNT"}},
        "envs": job.variables,
    }
    if job.secrets:
        result["secrets"] = dict.fromkeys(job.secrets)  # null: sky takes the value from --secret
    # The setup is not put under SkyPilot's own key: that runs in another shell, and `source .venv/bin/activate` is lost
    return result | {"run": bash_script(job)}


def bash_script(job: Job) -> str:
    """Return what bash runs on each machine, in the folder `code`."""
    return machine_script(
        job,
        first='read -r first <<< "$SKYPILOT_NODE_IPS"',
        endpoint=f'"$first:{port(job.options)}"',
        rank_variable="SKYPILOT_NODE_RANK",
        config=job.config_in_code,
        output_dir=f"{MOUNT}/{job.output_dir.lstrip('/')}",
    )


def command(job: Job, folder: str) -> str:
    """Return what to type; `sky jobs` watches the machines and starts the run again elsewhere when they go away."""
    secrets = "".join(f" --secret {name}" for name in job.secrets)
    return f"sky jobs launch{secrets} {shlex.quote(f'{folder}/{FILE}')}"
