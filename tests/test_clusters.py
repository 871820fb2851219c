"""Launch files for five kinds of cluster: the facts of each, and what bash, torchrun and Kubernetes make of them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import assert_refused

from course_lib.memory.cards import CARDS
from course_tools.clusters import TARGETS, Job, launch_files, start_command, write
from course_tools.clusters.command import main
from course_tools.clusters.skypilot import ACCELERATORS

NEEDS = {"kubernetes": {}, "azureml": {}, "skypilot": {"bucket": "s3://mine"}}  # those that take an image
ODD = 'it\'s 100% $HOME $(HOME) $$ `x` "y" \\'
MOUNTED = {"kubernetes": "/mnt/training/", "skypilot": "/mnt/training/"}
# Each rank takes part in one all-reduce. Rank 1 of the first attempt fails. The count that torchrun gives the ranks,
# TORCHELASTIC_RESTART_COUNT, is each agent's own, so a file tells the attempts apart.
PROGRAM = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total, folder, rank = torch.ones(1), sys.argv[1], dist.get_rank()
dist.all_reduce(total)
attempt = int(os.path.exists(f"{folder}/failed"))
with open(f"{folder}/attempt {attempt} rank {rank}", "w") as file:
    file.write(f"{total.item()} {os.environ['NOTE']}")
dist.barrier()
if attempt == 0 and rank == 1:
    open(f"{folder}/failed", "w").close()
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""

# Rank 0 has the batch script's notice come in its third step. A file is called by the step and the rank that saved it.
SAVES = """
import os, signal, sys, time
import torch, torch.distributed as dist
asked = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: asked.fill_(1))
dist.init_process_group("gloo")
for step in range(1, 3000):
    if step == 3 and dist.get_rank() == 0:
        os.kill(int(os.environ["BATCH"]), signal.SIGUSR1)
    time.sleep(0.01)
    anyone = asked.clone()
    dist.all_reduce(anyone, dist.ReduceOp.MAX)
    if anyone:
        open(f"{sys.argv[1]}/{step} {dist.get_rank()}", "w").close()
        break
dist.destroy_process_group()
"""


def job(target: str, **settings: Any) -> Job:
    """Two machines of eight, with what this target insists on."""
    usual: dict[str, Any] = {"name": "run", "num_nodes": 2, "gpus_per_node": 8, "options": NEEDS.get(target, {})}
    if settings.get("config") is None:
        usual["command"] = "-m course_lib.training.ddp --steps 3"
    if target in NEEDS:
        usual["image"] = "registry.example/training:1"
    return Job(**(usual | settings))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An Axolotl YAML in the folder from which the files are written."""
    monkeypatch.chdir(tmp_path)
    Path("run.yml").write_text("base_model: tiny\noutput_dir: out/lora\n", encoding="utf-8")
    return "run.yml"


def values_of(target: str, made: Job, name: str | None = None) -> dict[str, Any]:
    files = launch_files(made, target, "launch")
    return yaml.safe_load(files[name] if name else next(iter(files.values())))


def script_of(target: str, made: Job) -> str:
    """What bash runs on a machine; for Kubernetes as it arrives in the pod."""
    if target == "kubernetes":
        return expanded(values_of(target, made, "trainjob.yaml")["spec"]["trainer"]["args"][0], {})
    if target in ("azureml", "skypilot"):
        return values_of(target, made)[{"azureml": "command", "skypilot": "run"}[target]]
    (text,) = launch_files(made, target, "launch").values()
    return text


def expanded(text: str, values: dict[str, str]) -> str:
    """As Kubernetes expands env, command and args: $(NAME) where it knows NAME, and $$ as $."""
    return re.sub(r"\$(?:\$|\(([^)]*)\))", lambda hit: "$" if hit[0] == "$$" else values.get(hit[1], hit[0]), text)


def stand_in(folder: Path, name: str, body: str) -> None:
    """A command of this name that does something else."""
    (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


STANDS_FOR = {  # what the target sets on machine 0 of 2, and the variable that differs on machine 1
    "torchrun": ({}, ""),
    "slurm": ({"SLURM_JOB_ID": "19500", "SLURM_JOB_NODELIST": "node[1-2]"}, ""),
    "kubernetes": ({"PET_MASTER_ADDR": "10.0.0.7", "PET_MASTER_PORT": "29500"}, "PET_NODE_RANK"),
    "azureml": ({"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}, "NODE_RANK"),
    "skypilot": ({"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}, "SKYPILOT_NODE_RANK"),
}


def words_of(target: str, made: Job, folder: Path, machine: str = "0") -> list[str]:
    """The script runs under bash; in the launcher's place stands one that writes down the words that it is given."""
    stand_in(folder, "torchrun", 'printf "%s\\0" "$@"')
    stand_in(folder, "srun", 'shift 2; exec "$@"')
    stand_in(folder, "scontrol", "echo 10.0.0.7; echo 10.0.0.8")
    stand_in(folder, "mkdir", "exit 0")
    env, rank = STANDS_FOR[target]
    env = env | ({rank: machine} if rank else {}) | {"PATH": f"{folder}:/usr/bin:/bin"}
    command = ["bash", "-c", script_of(target, made).replace("${{outputs.run}}", "/mnt/out put"), "script"]
    done = subprocess.run([*command, "10.0.0.7:29500"], env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_starts_one_agent_a_machine_with_the_same_program(
    target: str, config: str, tmp_path: Path
) -> None:
    storage = "/mnt/out put" if target == "azureml" else f"{MOUNTED.get(target, '')}runs/run"
    made = job(target, max_restarts=5, command=["train.py", "--text", ODD, "--out={output_dir}/my run"])
    for machine in ("0", "1"):
        words = words_of(target, made, tmp_path, machine)
        assert {"--nnodes=2", "--nproc_per_node=8", "--max_restarts=5", "--rdzv_backend=c10d"} < set(words)
        assert "--rdzv_endpoint=10.0.0.7:29500" in words
        assert words[-4:] == ["train.py", "--text", ODD, f"--out={storage}/my run"]
        if STANDS_FOR[target][1]:
            (settings,) = (word for word in words if word.startswith("--rdzv_conf="))
            assert settings.endswith(f",is_host={1 - int(machine)}")
    # an Axolotl configuration resumes into the shared folder
    words = words_of(target, job(target, config=config), tmp_path)
    path = "/etc/training/config.yml" if target == "kubernetes" else config
    storage = "/mnt/out put" if target == "azureml" else f"{MOUNTED.get(target, '')}out/lora"
    expected = ["-m", "axolotl.cli.train", path, "--auto-resume-from-checkpoints=True", f"--output-dir={storage}"]
    assert words[words.index("-m") :] == expected


@pytest.mark.parametrize("target", TARGETS)
def test_the_environment_reaches_the_ranks_and_secrets_stay_out_of_the_files(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    made = job(target, env={"TEXT": ODD, "NCCL_DEBUG": "INFO"}, secrets=["WANDB_API_KEY"])
    text = "\n".join(launch_files(made, target).values())
    assert "hunter2" not in text + start_command(made, target)
    assert "WANDB_API_KEY" in text + start_command(made, target)
    expected = {"TEXT": ODD, "NCCL_DEBUG": "INFO", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    expected["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "100"  # of a notice of 120
    if target in ("torchrun", "slurm"):
        exports = [line for line in text.splitlines() if line.startswith("export ") and "RDZV_ENDPOINT" not in line]
        script = "\n".join([*exports, "env -0"])
        seen = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
        assert expected.items() <= dict(item.split("=", 1) for item in seen.split("\0") if item).items()
        (asked,) = [line for line in text.splitlines() if line.startswith(': "${WANDB_API_KEY:?')]
        assert subprocess.run(["bash", "-c", asked], capture_output=True, env={}).returncode != 0
    elif target == "kubernetes":
        *plain, secret = values_of(target, made, "trainjob.yaml")["spec"]["trainer"]["env"]
        assert {variable["name"]: expanded(variable["value"], expected) for variable in plain} == expected
        assert secret["valueFrom"]["secretKeyRef"] == {"name": "run-secrets", "key": "WANDB_API_KEY"}
    else:
        assert values_of(target, made)["environment_variables" if target == "azureml" else "envs"] == expected


def test_slurm_asks_for_the_cores_again_and_comes_back_before_its_time_is_over() -> None:
    made = job("slurm", hours=36.5, notice=300, cpus_per_gpu=4, options={"partition": "gpu", "gres_type": "a100"})
    text = launch_files(made, "slurm")["job.sbatch"]
    header = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")}
    expected = {"nodes=2", "ntasks-per-node=1", "gpus-per-node=a100:8", "cpus-per-task=32", "time=1-12:30:00"}
    assert header >= expected | {"signal=B:USR1@300", "requeue", "open-mode=append", "partition=gpu"}
    assert "srun --cpus-per-task=32 " in text
    on_cpu = launch_files(job("slurm", gpu="cpu"), "slurm")["job.sbatch"]
    assert "gpus-per-node" not in on_cpu and "export CUDA_VISIBLE_DEVICES=''" in on_cpu


def test_kubernetes_restarts_all_machines_together_on_shared_storage(config: str) -> None:
    made = job("kubernetes", config=config, max_restarts=2, hours=1, options={"claim": "lustre", "namespace": "team"})
    files = {name: yaml.safe_load(text) for name, text in launch_files(made, "kubernetes").items()}
    runtime, train = files["runtime.yaml"], files["trainjob.yaml"]
    assert {values["metadata"]["namespace"] for values in files.values()} == {"team"}
    assert files["config.yaml"]["data"]["config.yml"] == Path(config).read_text(encoding="utf-8")
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train["spec"]["activeDeadlineSeconds"] == 3600
    assert train["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    template = runtime["spec"]["template"]["spec"]
    assert template["failurePolicy"] == {"maxRestarts": 2}
    pod = template["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["output"]["persistentVolumeClaim"]["claimName"] == "lustre"
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(volumes)


def test_azure_skypilot_and_torchrun_name_the_machines() -> None:
    azure = values_of("azureml", job("azureml", gpu="v100-32gb"))
    assert azure["code"] == ".." and azure["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}
    assert azure["resources"] == {"instance_type": "Standard_ND40rs_v2", "instance_count": 2, "shm_size": "64g"}
    sky = values_of("skypilot", job("skypilot", gpu="H100-80GB"))
    assert sky["resources"]["accelerators"] == "H100:8" and sky["num_nodes"] == 2 and set(ACCELERATORS) == set(CARDS)
    named = job("torchrun", options={"head": "node7", "port": "4000"})
    assert start_command(named, "torchrun", "l") == "bash l/launch.sh node7:4000"


def test_the_command_writes_shows_and_explains(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--target", "slurm", "--config", config, "--nodes", "2", "--gpus-per-node", "8", "--set", "partition=gpu"]
    assert main(["write", *argv, "--out", "my files", "--env", "A=b=c"]) == 0
    assert "sbatch 'my files/job.sbatch'" in capsys.readouterr().out
    text = Path("my files/job.sbatch").read_text(encoding="utf-8")
    assert "#SBATCH --partition=gpu" in text and "export A=b=c" in text
    assert main(["show", *argv]) == 0
    assert "#SBATCH --partition=gpu" in capsys.readouterr().out and not Path("launch").exists()
    assert main(["options", "--target", "kubernetes"]) == 0
    assert "claim" in capsys.readouterr().out
    for bad in (["write", *argv, "--env", "A"], ["write", *argv, "--out", config], []):
        code, result = main(bad), capsys.readouterr()
        assert (code, result.out, result.err.count("\n")) == (2, "", 1), (bad, result)


@pytest.mark.system
def test_torchrun_two_agents_meet_and_start_again_together(tmp_path: Path) -> None:
    (tmp_path / "my program.py").write_text(PROGRAM, encoding="utf-8")
    settings = {"num_nodes": 2, "gpus_per_node": 1, "gpu": "cpu", "cpus_per_gpu": 1, "output_dir": "the out"}
    made = Job(name="run", command=["my program.py", "{output_dir}"], env={"NOTE": ODD}, **settings)
    (script,) = write(made, "torchrun", tmp_path / "my launch").files
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["timeout", "150", "bash", str(script), f"127.0.0.1:{port}"]
    how = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, **how) for _ in range(2)]
    outputs = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    results = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "the out").glob("attempt*")}
    assert results == {f"attempt {attempt} rank {rank}": f"2.0 {ODD}" for attempt in (0, 1) for rank in (0, 1)}


@pytest.mark.parametrize(
    ("noticed", "code", "count", "requeued"),
    [(True, 7, "9", True), (True, 7, "10", False), (True, 0, "0", False), (False, 7, "0", False)],
)
def test_the_slurm_script_queues_itself_again_and_returns_what_its_step_returned(
    noticed: bool, code: int, count: str, requeued: bool, tmp_path: Path
) -> None:
    """The real script under bash, with stand-ins for Slurm's commands: the step itself sends the signal."""
    signal_script = 'kill -USR1 "$PPID"; sleep 0.3; ' if noticed else ""
    stand_in(tmp_path, "srun", f"{signal_script}echo step >> {tmp_path}/asked; exit {code}")
    stand_in(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/asked; echo first; echo second')
    stand_in(tmp_path, "scancel", f'echo "$@" >> {tmp_path}/asked')
    script = write(job("slurm"), "slurm", tmp_path / "launch").files[0]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[1-2]"}
    env["SLURM_RESTART_COUNT"] = count
    done = subprocess.run(["bash", str(script)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    expected = ["show hostnames node[1-2]"] + ["--signal=TERM 41"] * noticed + ["step"] + ["requeue 41"] * requeued
    assert (tmp_path / "asked").read_text(encoding="utf-8").splitlines() == expected


@pytest.mark.parametrize("handled", ["SIGTERM", "SIGUSR2"])
def test_at_the_notice_the_ranks_save_at_one_step_before_the_job_is_queued_again(
    handled: str, tmp_path: Path, no_leftovers: None
) -> None:
    """Slurm signals a step's tasks, here torchrun. Ranks that do not handle what torchrun hands on save nothing."""
    saved = 2 if handled == "SIGTERM" else 0
    (tmp_path / "train.py").write_text(SAVES.replace("SIGTERM", handled), encoding="utf-8")
    stand_in(tmp_path, "srun", 'export BATCH=$PPID; shift 2; echo $$ > agent; exec "$@"')
    stand_in(tmp_path, "scontrol", 'echo "$@, $(ls out | wc -l) saved" >> asked; echo localhost')
    stand_in(tmp_path, "scancel", 'echo "$@" >> asked; kill -TERM "$(cat agent)"')
    settings = {"num_nodes": 1, "gpus_per_node": 2, "gpu": "cpu", "output_dir": "out"}
    made = job("slurm", command=["train.py", "{output_dir}"], **settings)
    script = write(made, "slurm", tmp_path / "launch").files[0]
    number = str(os.getpid())  # two sessions of tests do not meet either
    env = os.environ | {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "localhost", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{env['PATH']}"
    command = ["timeout", "100", "bash", str(script)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # torchrun's, after a signal
    asked = (tmp_path / "asked").read_text(encoding="utf-8").replace(number, "ID").splitlines()
    assert asked == ["show hostnames localhost, 0 saved", "--signal=TERM ID", f"requeue ID, {saved} saved"], done.stderr
    names = sorted(path.name.split() for path in (tmp_path / "out").iterdir())
    assert [rank for _, rank in names] == ["0", "1"][:saved] and len({step for step, _ in names}) == saved / 2


def test_kubernetes_files_are_what_trainers_own_models_take(config: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    kinds = {"runtime.yaml": models.TrainerV1alpha1TrainingRuntime, "trainjob.yaml": models.TrainerV1alpha1TrainJob}
    options = {"namespace": "team", "claim": "lustre", "queue": "gpus", "secret": "keys", "mount": "/mnt/x"}
    settings = {"env": {"NOTE": ODD}, "secrets": ["WANDB_API_KEY"], "setup": ["pip install ."], "options": options}
    for name, kind in kinds.items():
        values = values_of("kubernetes", job("kubernetes", config=config, **settings), name)
        # The models leave out what they do not know, and Kubernetes would refuse it: so what comes back is compared
        assert kind.from_dict(values).to_dict() == values


def test_what_means_nothing_is_refused(config: str, tmp_path: Path) -> None:
    settings = [
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"gpus_per_node": None}, "gpus_per_node"),
        ({"hours": 0.05}, "notice=120"),
        ({"gpu": "24GiB"}, "'24GiB'"),
        ({"name": "run\n"}, "name="),
        ({"command": "-m x\n--y"}, "command="),
        ({"command": "-m x 'y"}, "quotation mark"),
        ({"command": "torchrun --nnodes 2 train.py"}, "--nnodes"),
        ({"command": None}, "config="),
        ({"command": None, "config": "absent.yml"}, "absent.yml"),
        ({"setup": ["a\nb"]}, "setup[0]"),
        ({"setup": "source x"}, "setup="),
        ({"env": {"A B": "1"}}, "'A B'"),
        ({"env": {"RANK": "0"}}, "RANK"),
        ({"env": {"WANDB_API_KEY": "hunter2"}}, "secrets=['WANDB_API_KEY']"),
        ({"options": {"partition": "a\n#SBATCH --x"}}, "partition"),
    ]
    assert_refused((lambda given=given: job("slurm", **given), ValueError, part) for given, part in settings)
    (tmp_path / "code").mkdir()
    targets = [
        ("slrum", {}, "'slurm'"),
        ("slurm", {"options": {"partitoin": "gpu"}}, "'partition'"),
        ("slurm", {"options": {"requeues": "many"}}, "requeues"),
        ("slurm", {"image": "x"}, "image="),
        ("torchrun", {"options": {"port": "abc"}}, "port"),
        ("kubernetes", {"image": None}, "image"),
        ("azureml", {"gpus_per_node": 3}, "3"),
        ("azureml", {"setup": ["echo ${{inputs.x}}"]}, "${{"),
        ("skypilot", {"options": {}}, "bucket"),
        ("skypilot", {"config": config, "code": "code"}, config),
    ]
    assert_refused(
        (lambda target=target, given=given: launch_files(job(target, **given), target), ValueError, part)
        for target, given, part in targets
    )
    Path(config).write_text("a: 1\n b: [", encoding="utf-8")
    assert_refused([(lambda: job("slurm", config=config), ValueError, "line 2, column")])
