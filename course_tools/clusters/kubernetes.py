"""Kubernetes with Kubeflow Trainer 2.2 or later: a TrainJob, and the TrainingRuntime that it refers to.

The runtime says how a machine looks (volumes, shared memory, restarts), the TrainJob what runs on it. Trainer sets
PET_MASTER_ADDR, PET_MASTER_PORT and PET_NODE_RANK in each pod. https://www.kubeflow.org/docs/components/trainer/
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from course_tools.clusters.job import CPU, Job
from course_tools.clusters.launchers import machine_script
from course_tools.clusters.yaml_writer import to_yaml

API = "trainer.kubeflow.org/v1alpha1"
CONFIG_FOLDER = "/etc/training"
OPTIONS = {
    "namespace": "where the job lives; the one of your context if not given",
    "claim": "a PersistentVolumeClaim that all machines may write (ReadWriteMany), training-output if not given",
    "mount": "where the claim appears in the pods, /mnt/training if not given; a relative output_dir lies below it",
    "secret": "the Secret that holds the values of secrets, NAME-secrets if not given",
    "queue": "a LocalQueue of Kueue to wait in",
}


def files(job: Job, folder: str) -> dict[str, str]:
    """Write ``runtime.yaml`` and ``trainjob.yaml``, and ``config.yaml`` for an Axolotl YAML."""
    if job.image is None:
        raise ValueError("image is missing: name the container image that Kubernetes is to run.")
    result = {"runtime.yaml": to_yaml(runtime(job), f"{job.summary}\nHow one machine of it looks.")}
    secrets = "".join(f' --from-literal={name}="${name}"' for name in job.secrets)
    first = f"\nBefore it, once: kubectl create secret generic {secret(job)}{secrets}" if secrets else ""
    result["trainjob.yaml"] = to_yaml(train_job(job), f"{job.summary}\n{command(job, folder)}{first}")
    if job.config is not None:
        text = Path(job.config).read_text(encoding="utf-8")
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job), "data": {"config.yml": text}}
        result["config.yaml"] = to_yaml(config, f"{job.summary}\nIts Axolotl YAML, mounted at {CONFIG_FOLDER}.")
    return result


def metadata(job: Job, labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the name, and the namespace and labels where there are any."""
    result: dict[str, Any] = {"name": job.name}
    if "namespace" in job.options:
        result["namespace"] = job.options["namespace"]
    return result | ({"labels": labels} if labels else {})


def secret(job: Job) -> str:
    """Name the Secret whose keys are the job's `secrets`."""
    return job.options.get("secret", f"{job.name}-secrets")


def runtime(job: Job) -> dict[str, Any]:
    """Return the TrainingRuntime: one pod per machine; when one fails, all start again, `max_restarts` times."""
    volumes: list[dict[str, Any]] = [
        {"name": "output", "persistentVolumeClaim": {"claimName": job.options.get("claim", "training-output")}},
        # A pod has 64 MiB of shared memory by default; NCCL and data loaders need more
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "output", "mountPath": job.options.get("mount", "/mnt/training")},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    if job.config is not None:
        volumes.append({"name": "config", "configMap": {"name": job.name}})
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(30, job.notice),  # between SIGTERM and SIGKILL, to save in
        "containers": [{"name": "node", "image": job.image, "volumeMounts": mounts}],
        "volumes": volumes,
    }
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata(job, {"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": job.num_nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": job.max_restarts},
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": {"backoffLimit": 0, "template": {"spec": pod}},
                            },
                        }
                    ],
                }
            },
        },
    }


def train_job(job: Job) -> dict[str, Any]:
    """Return the TrainJob: what each machine runs, with which environment and on how many GPUs."""
    labels = {"kueue.x-k8s.io/queue-name": job.options["queue"]} if "queue" in job.options else None
    env: list[dict[str, Any]] = [{"name": name, "value": unexpanded(text)} for name, text in job.variables.items()]
    env += [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret(job), "key": name}}} for name in job.secrets]
    gpus = {} if job.gpu == CPU else {"nvidia.com/gpu": job.gpus_per_node}
    resources = {"requests": {"cpu": job.cpus} | gpus} | ({"limits": dict(gpus)} if gpus else {})
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": metadata(job, labels),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "activeDeadlineSeconds": job.seconds,
            "trainer": {
                "image": job.image,
                "numNodes": job.num_nodes,
                "numProcPerNode": job.gpus_per_node,
                "resourcesPerNode": resources,
                "env": env,
                "command": ["bash", "-c"],
                "args": [unexpanded(bash_script(job))],
            },
        },
    }


def bash_script(job: Job) -> str:
    """Return what bash runs in each pod."""
    return machine_script(
        job,
        endpoint='"$PET_MASTER_ADDR:$PET_MASTER_PORT"',
        rank_variable="PET_NODE_RANK",
        config=f"{CONFIG_FOLDER}/config.yml",
        output_dir=str(Path(job.options.get("mount", "/mnt/training"), job.output_dir)),
    )


def unexpanded(text: str) -> str:
    """Escape text for env, command and args, where Kubernetes expands $(NAME) and reads $$ as one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def command(job: Job, folder: str) -> str:
    """Return what to type where kubectl knows the cluster."""
    return f"kubectl apply -f {shlex.quote(folder + '/')}"
