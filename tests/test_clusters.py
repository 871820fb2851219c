"""Launch files for five kinds of cluster: each whole, and what bash, torchrun and the targets' own tools make of it.

`PYTHONPATH=.:tests python tests/test_clusters.py` writes tests/golden anew; read the difference before you commit it.
"""

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
from course_tools.clusters import TARGETS, Job, launch_files, start_command
from course_tools.clusters.command import main
from course_tools.clusters.targets import SKY_ACCELERATORS

GOLDEN = Path(__file__).parent / "golden"
IMAGE = "registry.example/training:1"
ODD = 'it\'s 100% $HOME $(HOME) $$ `x` "y" \\'
OPTIONS = {  # nearly all of each target
    "torchrun": {"head": "node7", "port": "4000"},
    "slurm": {
        "partition": "gpu",
        "account": "us",
        "constraint": "ib",
        "gres_type": "h100",
        "mem": "0",
        "requeues": "3",
    },
    "kubernetes": {"namespace": "us", "claim": "lustre", "mount": "/mnt/x", "secret": "keys", "queue": "gpus"},
    "azureml": {"experiment": "lora", "datastore": "ours", "shm_size": "128g"},
    "skypilot": {"bucket": "s3://ours", "infra": "gcp/us-central1", "use_spot": "yes", "port": "4000"},
}
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
    options = {"skypilot": {"bucket": "s3://ours"}, "azureml": {"compute": "ours"}}.get(target, {})
    usual: dict[str, Any] = {"name": "run", "num_nodes": 2, "gpus_per_node": 8, "options": options}
    if settings.get("config") is None:
        usual["command"] = "-m course_lib.training.ddp --steps 3"
    if target not in ("torchrun", "slurm"):
        usual["image"] = IMAGE
    return Job(**(usual | settings))


def golden_job(target: str) -> Job:
    """A job that uses most settings; its YAML lies with the golden files."""
    how = {"gpu": "h100", "cpus_per_gpu": 4, "hours": 36.5, "notice": 300, "max_restarts": 5}
    # Without its quotation marks 1e-5 would be a number to Kubernetes, which takes only text here
    what = {"env": {"NOTE": ODD, "LR": "1e-5", "NCCL_DEBUG": "INFO"}, "secrets": ["WANDB_API_KEY", "HF_TOKEN"]}
    setup = ["source .venv/bin/activate", "export NOW=$(date +%s)"]
    return job(target, config="run.yml", setup=setup, options=OPTIONS[target], **how, **what)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An Axolotl YAML in the folder from which the files are written."""
    monkeypatch.chdir(tmp_path)
    Path("run.yml").write_text("base_model: tiny\noutput_dir: out/lora\n", encoding="utf-8")
    return "run.yml"


def written(target: str, made: Job, folder: Path) -> Path:
    """The file of a target, in `folder`."""
    ((name, text),) = launch_files(made, target, folder).items()
    folder.mkdir()
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def documents(target: str, made: Job) -> list[dict[str, Any]]:
    (text,) = launch_files(made, target, "launch").values()
    return list(yaml.safe_load_all(text))


def script_and_environment(target: str, made: Job) -> tuple[str, dict[str, str]]:
    """What bash runs on a machine, and the environment that the target sets for it before."""
    if target in ("torchrun", "slurm"):
        return next(iter(launch_files(made, target, "launch").values())), {}
    values = documents(target, made)[-1]
    if target == "azureml":
        return values["command"], values["environment_variables"]
    if target == "skypilot":
        return values["run"], values["envs"]
    trainer = values["spec"]["trainer"]
    env = {variable["name"]: expanded(variable.get("value", "")) for variable in trainer["env"]}
    return expanded(trainer["args"][0]), env


def expanded(text: str) -> str:
    """As Kubernetes expands env, command and args, for a pod that has a variable HOME: $(HOME), and $$ as $."""
    return re.sub(r"\$(?:\$|\(HOME\))", lambda match: "$" if match[0] == "$$" else "/root", text)


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


def started(target: str, made: Job, folder: Path, machine: str = "0", **given: str) -> tuple[list[str], dict[str, str]]:
    """Run the script under bash with stand-ins for all commands; return torchrun's words and environment."""
    stand_in(folder, "torchrun", f'printf "%s\\0" "$@" > {folder}/words; env -0 > {folder}/environment')
    stand_in(folder, "srun", 'shift 2; exec "$@"')
    stand_in(folder, "scontrol", "echo 10.0.0.7; echo 10.0.0.8")
    stand_in(folder, "mkdir", "exit 0")
    cluster, rank = STANDS_FOR[target]
    script, env = script_and_environment(target, made)
    env = env | cluster | given | ({rank: machine} if rank else {}) | {"PATH": f"{folder}:/usr/bin:/bin"}
    command = ["bash", "-c", script.replace("${{outputs.run}}", "/mnt/out put"), "script", "10.0.0.7:29500"]
    subprocess.run(command, env=env, capture_output=True, timeout=60, check=True)
    environment = dict(item.split("=", 1) for item in (folder / "environment").read_text().split("\0") if item)
    return (folder / "words").read_text().split("\0")[:-1], environment


def storage(target: str, output_dir: str) -> str:
    """Where a machine finds the output folder."""
    mount = "/mnt/training/" if target in ("kubernetes", "skypilot") else ""
    return "/mnt/out put" if target == "azureml" else mount + output_dir


@pytest.mark.parametrize("target", TARGETS)
def test_each_file_is_the_golden_one_and_bash_can_parse_its_script(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(GOLDEN)
    made = golden_job(target)
    for name, text in launch_files(made, target, "launch").items():
        assert text == (GOLDEN / name).read_text(encoding="utf-8")
    subprocess.run(["bash", "-n"], input=script_and_environment(target, made)[0], text=True, check=True)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_starts_one_agent_a_machine_with_the_same_program(
    target: str, config: str, tmp_path: Path
) -> None:
    made = job(target, max_restarts=5, command=["train.py", "--text", ODD, "--out={output_dir}/my run", ""])
    for machine in ("0", "1"):
        words, _ = started(target, made, tmp_path, machine)
        expected = {"--nnodes=2", "--nproc_per_node=8", "--max_restarts=5", "--rdzv_backend=c10d"}
        assert expected | {"--rdzv_endpoint=10.0.0.7:29500"} < set(words)
        assert words[-5:] == ["train.py", "--text", ODD, f"--out={storage(target, 'runs/run')}/my run", ""]
        (settings,) = (word for word in words if word.startswith("--rdzv_conf="))
        assert settings.endswith(f",is_host={1 - int(machine)}") or not STANDS_FOR[target][1]
    # an Axolotl configuration resumes into the shared folder
    words, _ = started(target, job(target, config=config), tmp_path)
    path = "/etc/training/config.yml" if target == "kubernetes" else config
    expected = ["-m", "axolotl.cli.train", path, "--auto-resume-from-checkpoints=True"]
    assert words[words.index("-m") :] == [*expected, f"--output-dir={storage(target, 'out/lora')}"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_environment_reaches_the_ranks_and_secrets_stay_out_of_the_files(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    made = job(target, gpu="cpu", env={"TEXT": ODD, "NCCL_DEBUG": "INFO"}, secrets=["WANDB_API_KEY"])
    text = "\n".join([*launch_files(made, target).values(), start_command(made, target)])
    assert "hunter2" not in text and "WANDB_API_KEY" in text
    _, environment = started(target, made, tmp_path, WANDB_API_KEY="hunter2")
    expected = {"TEXT": ODD, "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "", "WANDB_API_KEY": "hunter2"}
    expected["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "100"  # of a notice of 120
    assert expected.items() <= environment.items()
    if target in ("torchrun", "slurm", "azureml"):  # the others notice a missing secret themselves
        with pytest.raises(subprocess.CalledProcessError):
            started(target, made, tmp_path)


def test_kubernetes_hands_over_the_config_as_it_is(config: str) -> None:
    text = "\n  # a comment further in\nbase_model: tiny\nprompt: |\n  $(HOME) {{ x }}\n\n  'y'\n"
    Path(config).write_text(text, encoding="utf-8")
    assert documents("kubernetes", job("kubernetes", config=config))[0]["data"]["config.yml"] == text


def test_kubernetes_files_are_what_trainers_own_models_take() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    kinds = [models.TrainerV1alpha1TrainingRuntime, models.TrainerV1alpha1TrainJob]
    _, *documents = yaml.safe_load_all((GOLDEN / "trainjob.yaml").read_text(encoding="utf-8"))
    for kind, values in zip(kinds, documents, strict=True):
        # The models leave out what they do not know, and Kubernetes would refuse it: so what comes back is compared
        assert kind.from_dict(values).to_dict() == values


def test_azureml_reads_the_job(tmp_path: Path) -> None:
    azure = pytest.importorskip("azure.ai.ml", reason="pip install azure-ai-ml")
    path = tmp_path / "job.yml"
    text = (GOLDEN / "job.yml").read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    read = azure.load_job(path)
    assert (read.distribution.process_count_per_instance, read.resources.instance_count) == (1, 2)
    path.write_text(text.replace("\nlimits:", "\nlimitz:"), encoding="utf-8")
    with pytest.raises(Exception, match="limitz"):
        azure.load_job(path)


def test_skypilot_reads_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # it keeps a configuration there
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    values = yaml.safe_load((GOLDEN / "task.yaml").read_text(encoding="utf-8"))
    secrets = [(name, "x") for name in values["secrets"]]
    task = sky.Task.from_yaml_config(values, secrets_overrides=secrets)
    assert task.num_nodes == 2 and [each.accelerators for each in task.resources] == [{"H100": 8}]
    with pytest.raises(ValueError, match="setupp"):
        sky.Task.from_yaml_config(values | {"setupp": "x"}, secrets_overrides=secrets)


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


def test_bad_input_ends_in_one_sentence_and_nothing_is_written(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"broken.yml": "a: 1\n b: [\n", "list.yml": "- a\n", "empty.yml": "", "long.yml": "x: 1\n" * 2_000_000}
    for name, text in (bad | {"number.yml": "output_dir: [1]\n"}).items():
        Path(name).write_text(text, encoding="utf-8")
    usual = ["write", "--target", "slurm", "--gpus-per-node", "8", "--config"]
    rows = [
        (usual, "--config"),
        ([], "VERB"),
        ([*usual, "broken.yml"], "line 2"),
        ([*usual, "number.yml"], "output_dir"),
    ]
    rows += [([*usual, name], name) for name in (*bad, "absent.yml")]
    rows += [([*usual, config, *more], more[1]) for more in (["--env", "A"], ["--out", config], ["--nodes", "two"])]
    before = sorted(Path().iterdir())
    for argv, fragment in rows:
        code, result = main(argv), capsys.readouterr()
        assert (code, result.out, result.err.count("\n")) == (2, "", 1), (argv, result)
        assert fragment in result.err, (argv, result.err)
    assert sorted(Path().iterdir()) == before


@pytest.mark.system
def test_torchrun_two_agents_meet_and_start_again_together(tmp_path: Path) -> None:
    (tmp_path / "my program.py").write_text(PROGRAM, encoding="utf-8")
    settings = {"num_nodes": 2, "gpus_per_node": 1, "gpu": "cpu", "cpus_per_gpu": 1, "output_dir": "the out"}
    made = Job(name="run", command=["my program.py", "{output_dir}"], env={"NOTE": ODD}, **settings)
    script = written("torchrun", made, tmp_path / "my launch")
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
    script = written("slurm", job("slurm"), tmp_path / "launch")
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
    script = written("slurm", made, tmp_path / "launch")
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


def test_what_means_nothing_is_refused(config: str, tmp_path: Path) -> None:
    settings = [
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"gpus_per_node": None}, "gpus_per_node"),
        ({"hours": 0.05}, "notice=120"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"gpu": "24GiB"}, "'24GiB'"),
        ({"name": "run\n"}, "name="),
        ({"command": "-m x 'y"}, "quotation mark"),
        ({"command": "torchrun --nnodes 2 train.py"}, "--nnodes"),
        ({"command": None}, "config="),
        ({"setup": ["a\nb"]}, "setup[0]"),
        ({"setup": "source x"}, "setup="),
        ({"secrets": "HF_TOKEN"}, "secrets="),
        ({"env": {"A B": "1"}}, "'A B'"),
        ({"env": {"A": 1}}, "env['A']=1"),
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
        ("torchrun", {"options": {"port": "70000"}}, "port"),
        ("kubernetes", {"image": None}, "image"),
        ("azureml", {"options": {}, "gpus_per_node": 3}, "3"),
        ("skypilot", {"options": {}}, "bucket"),
        ("skypilot", {"options": {"bucket": "s3://x", "use_spot": "maybe"}}, "use_spot"),
        ("skypilot", {"config": config, "code": "code"}, config),
    ]
    assert_refused(
        (lambda target=target, given=given: launch_files(job(target, **given), target), ValueError, part)
        for target, given, part in targets
    )
    assert set(SKY_ACCELERATORS) == set(CARDS)  # every card has SkyPilot's name for it


if __name__ == "__main__":
    os.chdir(GOLDEN)
    for target in TARGETS:
        for name, text in launch_files(golden_job(target), target, "launch").items():
            Path(name).write_text(text, encoding="utf-8")
