"""The launch files in the hands of the tools that they are for: bash and torchrun here, the others where installed.

Slurm, `azure-ai-ml` and `skypilot` are much larger than the course, so their tests run where somebody has them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from course_tools.clusters import Job, launch_files, start_command, write

# Each rank says who it is and takes part in one all-reduce. Asked to, rank 1 of the first attempt fails. The count that
# torchrun gives the ranks, TORCHELASTIC_RESTART_COUNT, is each agent's own, so a file tells the attempts apart.
WHO = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
me = {name.lower(): int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")}
me |= {"agent": os.getppid(), "pid": os.getpid(), "sum": total.item(), "note": os.environ["NOTE"]}
attempt = int(os.path.exists(f"{sys.argv[1]}/failed"))
with open(f"{sys.argv[1]}/attempt {attempt} rank {me['rank']}.json", "w") as file:
    json.dump(me, file)
dist.barrier()
if sys.argv[2] == "fail" and attempt == 0 and me["rank"] == 1:
    open(f"{sys.argv[1]}/failed", "w").close()
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""
QUOTED = "it's 100% $HOME"


def who(folder: Path, fail: bool, **settings: Any) -> Job:
    """Two machines with one CPU rank each, in a folder whose name needs quotes."""
    (folder / "who am I.py").write_text(WHO, encoding="utf-8")
    return Job(
        name="who",
        command=["who am I.py", "{output_dir}", "fail" if fail else "train"],
        num_nodes=2,
        gpus_per_node=1,
        gpu="cpu",
        cpus_per_gpu=1,
        env={"NOTE": QUOTED},
        output_dir="the out",
        **settings,
    )


def said(folder: Path, attempt: int) -> list[dict[str, Any]]:
    """What the ranks of one attempt wrote, by rank."""
    files = sorted((folder / "the out").glob(f"attempt {attempt} rank *.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes put into the list are ended with everything that they started."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        alive = [psutil.Process(one.pid) for one in started if one.poll() is None]
        for process in [child for one in alive for child in one.children(recursive=True)] + alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass  # it ended by itself meanwhile, as it should
        for one in started:
            one.communicate()


def test_torchrun_two_agents_meet_and_start_again_together(tmp_path: Path, no_leftovers: None) -> None:
    written = write(who(tmp_path, fail=True), "torchrun", tmp_path / "my launch")
    command = ["bash", str(written.files[0]), f"127.0.0.1:{free_port()}"]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with ended() as agents:
        for _ in range(2):
            agents.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        outputs = [agent.communicate(timeout=150)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    seen = [said(tmp_path, attempt) for attempt in (0, 1)]
    for ranks in seen:
        assert [one["rank"] for one in ranks] == [0, 1]
        assert all(one["world_size"] == 2 and one["sum"] == 2.0 and one["local_rank"] == 0 for one in ranks)
        assert {one["group_rank"] for one in ranks} == {0, 1}
        assert {one["agent"] for one in ranks} == {agent.pid for agent in agents}, "exec keeps bash's process id"
        assert {one["note"] for one in ranks} == {QUOTED}
    pids = {one["pid"] for ranks in seen for one in ranks}
    assert len(pids) == 4 and not any(psutil.pid_exists(pid) for pid in pids)


STANDS_FOR = {  # what the target sets on machine 0 of 2, and the variable that differs on machine 1
    "kubernetes": ({"PET_MASTER_ADDR": "10.0.0.7", "PET_MASTER_PORT": "29500"}, "PET_NODE_RANK"),
    "azureml": ({"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}, "NODE_RANK"),
    "skypilot": ({"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}, "SKYPILOT_NODE_RANK"),
}


@pytest.mark.parametrize("kind", ["command", "config"])
@pytest.mark.parametrize("target", STANDS_FOR)
def test_bash_turns_the_script_into_the_words_meant(target: str, kind: str, tmp_path: Path) -> None:
    """The script runs; in the launcher's place stands one that writes down the words that it is given."""
    for name in ("torchrun", "mkdir"):
        body = "exit 0" if name == "mkdir" else f'printf "%s\\0" {name} "$@"'
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    options = {"bucket": "s3://mine"} if target == "skypilot" else {}
    made = Job(name="run", command=["train.py", QUOTED], num_nodes=2, gpus_per_node=4, image="x", options=options)
    if kind == "config":
        (tmp_path / "a run.yml").write_text("base_model: tiny\n", encoding="utf-8")
        made = replace(made, command=None, config=str(tmp_path / "a run.yml"), code=str(tmp_path))
    (text, *_) = [
        text for name, text in launch_files(made, target).items() if name not in ("runtime.yaml", "config.yaml")
    ]
    values = yaml.safe_load(text)
    script = {
        "kubernetes": lambda: values["spec"]["trainer"]["args"][0],  # it has no $( and no $$ that Kubernetes would read
        "azureml": lambda: values["command"].replace("${{outputs.run}}", "/mnt/out put"),
        "skypilot": lambda: values["run"],
    }[target]()
    env, rank = STANDS_FOR[target]
    for machine in ("0", "1"):
        here = env | {rank: machine, "PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(["bash", "-c", script], env=here, capture_output=True, text=True, timeout=20, check=True)
        words = done.stdout.split("\0")[:-1]
        assert "--rdzv_endpoint=10.0.0.7:29500" in words
        (conf,) = (word for word in words if word.startswith("--rdzv_conf="))
        assert conf.endswith(f",is_host={1 - int(machine)}")
        if kind == "command":
            assert words[-2:] == ["train.py", QUOTED]
        elif target == "azureml":
            assert words[-1] == "--output-dir=/mnt/out put" and "a run.yml" in words
        else:
            assert words[-1] == "--output-dir=/mnt/training/runs/run"


def everything(target: str, config: str, code: str) -> list[Job]:
    """A job of each kind with every setting that leaves a trace in a file."""
    options = {
        "kubernetes": {"namespace": "team", "claim": "lustre", "queue": "gpus", "secret": "keys", "mount": "/mnt/x"},
        "azureml": {"experiment": "lora", "datastore": "workspaceblobstore", "shm_size": "32g"},
        "skypilot": {"bucket": "s3://my-bucket", "infra": "aws", "use_spot": "yes", "port": "29501"},
    }[target]
    common = {
        "name": "run",
        "num_nodes": 2,
        "gpus_per_node": 8,
        "image": "registry.example/training:1",
        "code": code,
        "env": {"NOTE": QUOTED},
        "secrets": ["WANDB_API_KEY"],
        "setup": ["pip install ."],
        "options": options,
    }
    return [Job(config=config, **common), Job(command="-m a.b --out {output_dir}", gpu="cpu", **common)]


@pytest.fixture
def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> list[Job]:
    """The jobs of the target that the test is named for."""
    (tmp_path / "run.yml").write_text("base_model: tiny\n", encoding="utf-8")
    (target,) = (name for name in ("kubernetes", "azureml", "skypilot") if name in request.node.name)
    made = everything(target, str(tmp_path / "run.yml"), str(tmp_path))
    if target == "azureml":  # no size of machine is known for ranks on CPU
        made[1] = replace(made[1], options={"compute": "cpu-cluster"})
    return made


def test_kubernetes_files_are_what_trainers_own_models_take(jobs: list[Job]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    kinds = {
        "runtime.yaml": models.TrainerV1alpha1TrainingRuntime,
        "trainjob.yaml": models.TrainerV1alpha1TrainJob,
        "config.yaml": None,  # a plain ConfigMap
    }
    for job in jobs:
        for name, text in launch_files(job, "kubernetes").items():
            values = yaml.safe_load(text)
            if kinds[name] is None:
                assert set(values) == {"apiVersion", "kind", "metadata", "data"}
                continue
            # The models leave out what they do not know, and Kubernetes would refuse it: so what comes back is compared
            assert kinds[name].from_dict(values).to_dict() == values


def test_azureml_reads_the_job(jobs: list[Job], tmp_path: Path) -> None:
    azure = pytest.importorskip("azure.ai.ml", reason="pip install azure-ai-ml (130 MB)")
    for job in jobs:
        (path,) = write(job, "azureml", tmp_path / "azure").files
        read = azure.load_job(path)
        assert (read.distribution.type.lower(), read.distribution.process_count_per_instance) == ("pytorch", 1)
        assert (read.resources.instance_count, read.limits.timeout) == (2, 86400)
        assert (path.parent / read.code).resolve() == tmp_path
        path.write_text(path.read_text(encoding="utf-8").replace("\nlimits:", "\nlimitz:"), encoding="utf-8")
        with pytest.raises(Exception, match="limitz"):
            azure.load_job(path)


def test_skypilot_reads_the_task(jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # it keeps a configuration there
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    sky = pytest.importorskip("sky", reason="pip install skypilot (450 MB)")
    for job in jobs:
        (text,) = launch_files(job, "skypilot").values()
        task = sky.Task.from_yaml_config(yaml.safe_load(text), secrets_overrides=[("WANDB_API_KEY", "x")])
        assert task.num_nodes == 2 and "/mnt/training" in task.storage_mounts
        (resources,) = task.resources
        assert resources.accelerators == (None if job.gpu == "cpu" else {"A100-80GB": 8})
        assert resources.use_spot and resources.job_recovery["max_restarts_on_errors"] == 3
        with pytest.raises(ValueError, match="setupp"):
            sky.Task.from_yaml_config(yaml.safe_load(text) | {"setupp": "x"})


def test_slurm_really_runs_the_script_on_two_machines(tmp_path: Path) -> None:
    if shutil.which("sbatch") is None or subprocess.run(["sinfo"], capture_output=True).returncode != 0:
        pytest.skip("no Slurm here: sbatch and a controller that answers sinfo are needed")
    activate = f"export PATH={Path(sys.executable).parent}:$PATH"
    made = who(tmp_path, fail=False, setup=[activate], hours=0.2)
    written = write(made, "slurm", tmp_path / "launch")
    command = start_command(made, "slurm", tmp_path / "launch").split()
    subprocess.run([command[0], "--test-only", *command[1:]], cwd=tmp_path, check=True)
    number = subprocess.run(
        ["sbatch", "--parsable", str(written.files[0])], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    try:
        deadline = time.monotonic() + 60
        while len(said(tmp_path, 0)) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        subprocess.run(["scancel", number], check=True)
    log = (tmp_path / f"who-{number}.out").read_text(encoding="utf-8")
    ranks = said(tmp_path, 0)
    assert [one["world_size"] for one in ranks] == [2, 2], log
    assert {one["group_rank"] for one in ranks} == {0, 1} and len({one["agent"] for one in ranks}) == 2
