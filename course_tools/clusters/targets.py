"""What differs from target to target: its file, its options, the command that starts it, the values of its template."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from course_tools.clusters.job import Job

# Microsoft's list of GPU sizes by card and number of cards: https://learn.microsoft.com/azure/virtual-machines/sizes
AZURE_SIZES = {
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

# SkyPilot's names of the cards, as `sky gpus list` (formerly show-gpus) prints them
SKY_ACCELERATORS = {
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


class Target(NamedTuple):
    """A kind of cluster."""

    file: str  # what is written, from templates/FILE.j2
    values: Callable[[Job, str, str], dict[str, Any]]  # (job, folder of the file, the file's path in a shell)
    options: dict[str, str]  # what `Job.options` may hold, and what each is for


def torchrun(job: Job, folder: str, path: str) -> dict[str, Any]:
    """Machines that you reach yourself: one script, typed on each of them."""
    _refuse_image(job)
    head = job.options.get("head", "FIRST_MACHINE" if job.num_nodes > 1 else "localhost")
    start = f"bash {path} {shlex.quote(head)}:{_number(job, 'port', 29500, most=65535)}"
    return {"start": start} | _program(job, job.config, shlex.quote(job.output_dir))


def slurm(job: Job, folder: str, path: str) -> dict[str, Any]:
    """A script for sbatch, which saves and queues itself again when its time limit is near."""
    _refuse_image(job)
    gres_type = [job.options["gres_type"]] if "gres_type" in job.options else []
    minutes, seconds = divmod(job.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return {
        "start": f"sbatch {path}",
        "gpus": "" if job.on_cpu else ":".join([*gres_type, str(job.gpus_per_node)]),
        "time": f"{hours // 24}-{hours % 24:02}:{minutes:02}:{seconds:02}",
        "requeues": _number(job, "requeues", 10, least=0),
    } | _program(job, job.config, shlex.quote(job.output_dir))


def kubernetes(job: Job, folder: str, path: str) -> dict[str, Any]:
    """A TrainJob of Kubeflow Trainer 2.2 or later, the TrainingRuntime that it refers to, and a ConfigMap.

    Trainer sets PET_MASTER_ADDR, PET_MASTER_PORT and PET_NODE_RANK in each pod:
    https://www.kubeflow.org/docs/components/trainer/
    """
    _need_image(job)
    mount = job.options.get("mount", "/mnt/training")
    output_dir = str(PurePosixPath(mount, job.output_dir))
    return {
        "start": f"kubectl apply -f {path}",
        "config_text": Path(job.config).read_text(encoding="utf-8-sig").rstrip("\n") if job.config else "",
        "secret": job.options.get("secret", f"{job.name}-secrets"),
        "mount": mount,
        "grace": max(30, job.notice),
    } | _program(job, "/etc/training/config.yml", shlex.quote(output_dir))


def azureml(job: Job, folder: str, path: str) -> dict[str, Any]:
    """A command job: `az ml job create` sends the code, and starts one torchrun on each machine."""
    _need_image(job)
    # The values of secrets go into the job's record, not into a file
    secrets = "".join(f' --set environment_variables.{name}="${name}"' for name in job.secrets)
    datastore = job.options.get("datastore", "workspaceblobstore")
    return {
        "start": f"az ml job create --file {path}{secrets}",
        "code": os.path.relpath(job.code, folder),
        "storage": f"azureml://datastores/{datastore}/paths/{job.output_dir.strip('/')}",
        "instance_type": None if "compute" in job.options else _azure_size(job),
        # Azure ML replaces this expression by the folder where it has mounted `storage`
    } | _program(job, _config_in_code(job), '"${{outputs.run}}"')


def skypilot(job: Job, folder: str, path: str) -> dict[str, Any]:
    """A task that `sky jobs` runs on whichever cloud has the cards, and starts elsewhere when a machine goes away.

    https://docs.skypilot.co/en/latest/reference/yaml-spec.html
    """
    if "bucket" not in job.options:
        raise ValueError("options['bucket'] is missing: name the storage that outlives a machine, such as s3://mine.")
    spot = job.options.get("use_spot", "no")
    if spot not in ("yes", "no"):
        raise ValueError(f"options['use_spot']={spot!r}: say yes or no.")
    secrets = "".join(f" --secret {name}" for name in job.secrets)
    output_dir = f"/mnt/training/{job.output_dir.lstrip('/')}"
    return {
        "start": f"sky jobs launch{secrets} {path}",
        "accelerator": None if job.on_cpu else SKY_ACCELERATORS[job.gpu],
        "use_spot": "true" if spot == "yes" else "false",
        "port": _number(job, "port", 29500, most=65535),
    } | _program(job, _config_in_code(job), shlex.quote(output_dir))


def _program(job: Job, config: str | None, output_dir: str) -> dict[str, str]:
    """Return what torchrun starts, as shell text: the job's command, or Axolotl on `config`.

    Args:
        config: where the Axolotl YAML lies on the machine.
        output_dir: the output folder on the machine, as shell text.
    """
    # The first attempt finds no checkpoint and begins; every later one continues
    resume = "--auto-resume-from-checkpoints=True"
    words = job.command or ["-m", "axolotl.cli.train", config, resume, "--output-dir={output_dir}"]
    text = ""
    for word in words:
        parts = [shlex.quote(part) if part else "" for part in word.split("{output_dir}")]
        text += " \\\n  " if word.startswith("--") else " "
        text += output_dir.join(parts) or "''"
    return {"program": text.lstrip(), "output_dir": output_dir}


def _config_in_code(job: Job) -> str | None:
    """Return where the config lies inside the folder `code`, which is sent to the machines."""
    if job.config is None:
        return None
    inside = PurePosixPath(os.path.relpath(job.config, job.code))
    if ".." in inside.parts:
        raise ValueError(f"config={job.config!r} lies outside code={job.code!r}, so no machine would receive it.")
    return str(inside)


def _azure_size(job: Job) -> str:
    """Return the machine that has these cards in this number."""
    size = job.options.get("instance_type") or AZURE_SIZES.get((job.gpu, job.gpus_per_node))
    if size:
        return size
    counts = [str(count) for gpu, count in AZURE_SIZES if gpu == job.gpu]
    known = f"Azure's machines come with {' or '.join(counts)} of them" if counts else "no machine is known with them"
    what = "ranks on CPU" if job.on_cpu else f"{job.gpus_per_node} x {job.gpu}"
    raise ValueError(f"{what}: {known}; name another in options['instance_type'], or a cluster in 'compute'.")


def _refuse_image(job: Job) -> None:
    if job.image is not None:
        raise ValueError(f"image={job.image!r}: this target starts no container; load the environment in setup.")


def _need_image(job: Job) -> None:
    if job.image is None:
        raise ValueError("image is missing: name the container image that this target is to run.")


def _number(job: Job, option: str, default: int, *, least: int = 1, most: int = 10**6) -> int:
    text = job.options.get(option, str(default))
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ValueError(f"options[{option!r}]={text!r}: give a whole number from {least} to {most}.")
    return int(text)


TARGETS = {
    "torchrun": Target(
        "launch.sh",
        torchrun,
        {"head": "name or address of the first machine", "port": "free port on it, 29500 if not given"},
    ),
    "slurm": Target(
        "job.sbatch",
        slurm,
        {
            "partition": "queue to wait in",
            "account": "who pays",
            "qos": "quality of service",
            "constraint": "features that the machines must have",
            "gres_type": "the cluster's own name of the card, as sinfo prints it after gpu:",
            "mem": "memory of each machine, 0 for all of it",
            "requeues": "how often the job may queue again when its time is over, 10 if not given",
        },
    ),
    "kubernetes": Target(
        "trainjob.yaml",
        kubernetes,
        {
            "namespace": "where the job lives; the one of your context if not given",
            "claim": "a PersistentVolumeClaim that all machines may write (ReadWriteMany), training-output if not given",
            "mount": "where the claim appears in the pods, /mnt/training if not given; a relative output_dir lies below it",
            "secret": "the Secret that holds the values of secrets, NAME-secrets if not given",
            "queue": "a LocalQueue of Kueue to wait in",
        },
    ),
    "azureml": Target(
        "job.yml",
        azureml,
        {
            "compute": "name of a cluster in your workspace; without it the machines are rented for this job (serverless)",
            "instance_type": "the machine's size, where Azure has several with these cards",
            "experiment": "what the job is filed under, its name if not given",
            "datastore": "where output_dir lies, workspaceblobstore if not given",
            "shm_size": "shared memory for NCCL and data loaders, 64g if not given",
        },
    ),
    "skypilot": Target(
        "task.yaml",
        skypilot,
        {
            "bucket": "what holds the output of every attempt, such as s3://my-bucket; needed",
            "infra": "where to rent, such as aws, gcp/us-central1 or k8s; the cheapest if not given",
            "use_spot": "yes: machines that may be taken away, for less money",
            "port": "free port on the first machine, 29500 if not given",
        },
    ),
}
