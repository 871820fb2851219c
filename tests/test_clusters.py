"""Launch files for five kinds of cluster: what stands in them, and one sentence for what means nothing."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from course_lib.memory.cards import CARDS
from course_tools.clusters import TARGETS, Job, launch_files, start_command, write
from course_tools.clusters.skypilot import ACCELERATORS

NEEDS = {"kubernetes": {}, "azureml": {}, "skypilot": {"bucket": "s3://mine"}}  # those that take an image
ODD = 'it\'s 100% $HOME $(HOME) $$ `x` "y" \\'


def job(target: str, **settings: Any) -> Job:
    """Two machines of eight, with what this target insists on."""
    usual: dict[str, Any] = {"name": "run", "num_nodes": 2, "gpus_per_node": 8, "options": NEEDS.get(target, {})}
    if settings.get("config") is None:
        usual["command"] = "-m course_lib.training.data_parallel.ddp --steps 3"
    if target in NEEDS:
        usual["image"] = "registry.example/training:1"
    return Job(**(usual | settings))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An Axolotl YAML in the folder from which the files are written."""
    monkeypatch.chdir(tmp_path)
    Path("run.yml").write_text("base_model: tiny\noutput_dir: out/lora\n", encoding="utf-8")
    return "run.yml"


def script_of(target: str, made: Job, folder: str = "launch") -> str:
    """What bash runs on a machine; for Kubernetes as it arrives in the pod."""
    files = launch_files(made, target, folder)
    if target == "kubernetes":
        return expanded(yaml.safe_load(files["trainjob.yaml"])["spec"]["trainer"]["args"][0], {})
    if target in ("azureml", "skypilot"):
        (text,) = files.values()
        return yaml.safe_load(text)[{"azureml": "command", "skypilot": "run"}[target]]
    (text,) = files.values()
    return text


def expanded(text: str, values: dict[str, str]) -> str:
    """As Kubernetes expands env, command and args: $(NAME) where it knows NAME, and $$ as $."""
    return re.sub(r"\$(?:\$|\(([^)]*)\))", lambda hit: "$" if hit[0] == "$$" else values.get(hit[1], hit[0]), text)


def words_of(target: str, made: Job) -> list[str]:
    """The words of the launcher's line, to the end of the program's arguments."""
    text = script_of(target, made).replace("\\\n", " ")
    (agent,) = [line for line in text.splitlines() if re.search(r"\btorchrun ", line)]
    found = [word for word in shlex.split(agent) if word not in ("exec", "&")]
    return found[found.index("torchrun") :]


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_starts_one_agent_a_machine(target: str) -> None:
    made = job(target, max_restarts=5, command=["train.py", "--text", ODD, "--out={output_dir}/my run"])
    words = words_of(target, made)
    assert words[0] == "torchrun"
    assert {"--nnodes=2", "--nproc_per_node=8", "--max_restarts=5", "--rdzv_backend=c10d"} < set(words)
    assert any(word.startswith("--rdzv_id=") for word in words)
    place = {
        "kubernetes": "/mnt/training/runs/run",
        "skypilot": "/mnt/training/runs/run",
        "azureml": "${{outputs.run}}",
    }
    output_dir = place.get(target, "runs/run")
    assert words[-4:] == ["train.py", "--text", ODD, f"--out={output_dir}/my run"]
    subprocess.run(["bash", "-n"], input=script_of(target, made), text=True, check=True)


@pytest.mark.parametrize("target", TARGETS)
def test_an_axolotl_config_resumes_into_the_shared_folder(target: str, config: str) -> None:
    words = words_of(target, job(target, config=config))
    begin = words.index("-m")
    path = "/etc/training/config.yml" if target == "kubernetes" else config
    assert words[begin : begin + 4] == ["-m", "axolotl.cli.train", path, "--auto-resume-from-checkpoints=True"]
    place = {
        "kubernetes": "/mnt/training/out/lora",
        "skypilot": "/mnt/training/out/lora",
        "azureml": "${{outputs.run}}",
    }
    assert words[-1] == f"--output-dir={place.get(target, 'out/lora')}"


@pytest.mark.parametrize("target", TARGETS)
def test_the_environment_reaches_the_ranks_and_secrets_stay_out_of_the_files(
    target: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    made = job(target, config=config, env={"TEXT": ODD, "NCCL_DEBUG": "INFO"}, secrets=["WANDB_API_KEY"])
    files = launch_files(made, target)
    assert "hunter2" not in "".join(files.values()) + start_command(made, target)
    expected = {"TEXT": ODD, "NCCL_DEBUG": "INFO", "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if target in ("torchrun", "slurm"):
        (text,) = files.values()
        exports = "\n".join(
            line for line in text.splitlines() if line.startswith("export ") and "RDZV_ENDPOINT" not in line
        )
        seen = subprocess.run(["bash", "-c", f"{exports}\nenv -0"], capture_output=True, text=True, check=True).stdout
        assert expected.items() <= dict(item.split("=", 1) for item in seen.split("\0") if item).items()
        asked = [line for line in text.splitlines() if line.startswith(': "${WANDB_API_KEY:?')]
        assert subprocess.run(["bash", "-c", asked[0]], capture_output=True, env={}).returncode != 0
        return
    if target == "kubernetes":
        trainer = yaml.safe_load(files["trainjob.yaml"])["spec"]["trainer"]
        assert {one["name"]: expanded(one["value"], expected) for one in trainer["env"][:-1]} == expected
        assert trainer["env"][-1]["valueFrom"]["secretKeyRef"] == {"name": "run-secrets", "key": "WANDB_API_KEY"}
        assert yaml.safe_load(files["config.yaml"])["data"]["config.yml"] == Path(config).read_text(encoding="utf-8")
        return
    (text,) = files.values()
    assert yaml.safe_load(text)["environment_variables" if target == "azureml" else "envs"] == expected
    asks = {"azureml": 'environment_variables.WANDB_API_KEY="$WANDB_API_KEY"', "skypilot": "--secret WANDB_API_KEY"}
    assert asks[target] in start_command(made, target)
    assert target == "azureml" or yaml.safe_load(text)["secrets"] == {"WANDB_API_KEY": None}


def test_slurm_asks_for_the_cores_again_and_comes_back_before_its_time_is_over() -> None:
    made = job("slurm", hours=36.5, notice=300, cpus_per_gpu=4, options={"partition": "gpu", "gres_type": "a100"})
    text = launch_files(made, "slurm")["job.sbatch"]
    header = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")}
    assert header >= {
        *("nodes=2", "ntasks-per-node=1", "gpus-per-node=a100:8", "cpus-per-task=32", "time=1-12:30:00"),
        *("signal=B:USR1@300", "requeue", "open-mode=append", "partition=gpu"),
    }
    assert "srun --cpus-per-task=32 " in text
    on_cpu = launch_files(job("slurm", gpu="cpu"), "slurm")["job.sbatch"]
    assert "gpus-per-node" not in on_cpu and "export CUDA_VISIBLE_DEVICES=''" in on_cpu


@pytest.mark.parametrize("count, requeued", [("", True), ("9", True), ("10", False)])
def test_the_script_queues_itself_again_and_returns_what_its_step_returned(
    tmp_path: Path, count: str, requeued: bool
) -> None:
    """The real script under bash, with stand-ins for srun and scontrol: the step is signalled for by the step itself."""
    step = 'kill -USR1 "$PPID"; sleep 0.3; exit 7'
    for name, text in (("srun", step), ("scontrol", f'echo "$@" >> {tmp_path}/asked; echo first; echo second')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[1-2]"}
    written = write(job("slurm"), "slurm", tmp_path / "launch")
    done = subprocess.run(
        ["bash", str(written.files[0])],
        env=env | ({"SLURM_RESTART_COUNT": count} if count else {}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 7, done.stderr
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == ["show hostnames node[1-2]"] + ["requeue 41"] * requeued


def test_kubernetes_restarts_all_machines_together_on_shared_storage(config: str) -> None:
    made = job("kubernetes", config=config, max_restarts=2, hours=1, options={"claim": "lustre", "namespace": "team"})
    files = launch_files(made, "kubernetes")
    runtime, train = yaml.safe_load(files["runtime.yaml"]), yaml.safe_load(files["trainjob.yaml"])
    assert {yaml.safe_load(text)["metadata"]["namespace"] for text in files.values()} == {"team"}
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train["spec"]["activeDeadlineSeconds"] == 3600
    assert train["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    template = runtime["spec"]["template"]["spec"]
    assert template["failurePolicy"] == {"maxRestarts": 2}
    pod = template["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["output"]["persistentVolumeClaim"]["claimName"] == "lustre"
    assert {one["name"] for one in pod["containers"][0]["volumeMounts"]} == set(volumes)


def test_azure_finds_the_code_and_a_machine_with_these_cards() -> None:
    made = yaml.safe_load(launch_files(job("azureml", gpu="v100-32gb"), "azureml", "launch/azure")["job.yml"])
    assert made["code"] == "../.."
    assert made["resources"] == {"instance_type": "Standard_ND40rs_v2", "instance_count": 2, "shm_size": "64g"}
    assert made["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}
    made = yaml.safe_load(launch_files(job("azureml", options={"compute": "big"}), "azureml")["job.yml"])
    assert made["compute"] == "azureml:big" and "instance_type" not in made["resources"]


def test_the_first_machine_is_named_once_known() -> None:
    for settings, place in [
        ({"options": {"head": "node7", "port": "4000"}}, "node7:4000"),
        ({}, "FIRST_MACHINE:29500"),
    ]:
        assert start_command(job("torchrun", **settings), "torchrun", "l") == f"bash l/launch.sh {place}"
    assert start_command(job("torchrun", num_nodes=1), "torchrun").endswith(" localhost:29500")


def test_skypilot_knows_every_card() -> None:
    assert set(ACCELERATORS) == set(CARDS)
    made = yaml.safe_load(launch_files(job("skypilot", gpu="H100-80GB"), "skypilot")["task.yaml"])
    assert made["resources"]["accelerators"] == "H100:8" and made["num_nodes"] == 2


def test_a_job_without_a_torch_import() -> None:
    code = "import course_tools.clusters.command, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


BAD = [
    ({"num_nodes": 0}, "num_nodes=0: give a whole number of at least 1"),
    ({"gpus_per_node": None}, "gpus_per_node is missing"),
    ({"gpus_per_node": True}, "gpus_per_node=True"),
    ({"max_restarts": -1}, "max_restarts=-1"),
    ({"hours": 0}, "hours=0"),
    ({"hours": float("nan")}, "hours=nan"),
    ({"hours": 0.05}, "ask for more hours"),
    ({"gpu": "a100-80"}, "a100-80gb"),
    ({"gpu": "24GiB"}, "amount of memory"),
    ({"name": "My run"}, "small letters, digits and dashes"),
    ({"name": "run\n"}, "small letters, digits and dashes"),
    ({"command": "-m x\n--y"}, "line breaks"),
    ({"command": "-m x 'y"}, "quotation mark"),
    ({"command": "python train.py"}, "the launcher and its options are written for you"),
    ({"command": "torchrun --nnodes 2 train.py"}, "the launcher and its options are written for you"),
    ({"command": None}, "either config="),
    ({"config": "run.yml", "command": "x.py"}, "either config="),
    ({"command": None, "config": "absent.yml"}, "no such file"),
    ({"setup": ["a\nb"]}, "setup[0]"),
    ({"setup": "source x"}, "give a list"),
    ({"output_dir": "runs\n"}, "output_dir"),
    ({"image": "a b"}, "no spaces"),
    ({"env": {"A B": "1"}}, "no name of an environment variable"),
    ({"env": {"A": "1\n2"}}, "one line"),
    ({"env": {"A": 1}}, "one line"),
    ({"env": {"RANK": "0"}}, "set by the launcher"),
    ({"env": {"WANDB_API_KEY": "hunter2"}}, "secrets=['WANDB_API_KEY']"),
    ({"options": {"partition": "a\n#SBATCH --x"}}, "line breaks"),
]


@pytest.mark.parametrize("settings, words", BAD)
def test_bad_settings_get_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as said:
        job("slurm", **({"config": None} | settings))
    assert "\n" not in str(said.value) and "hunter2" not in str(said.value)


@pytest.mark.parametrize(
    "target, settings, words",
    [
        ("slrum", {}, "did you mean 'slurm'?"),
        ("slurm", {"options": {"partitoin": "gpu"}}, "did you mean 'partition'?"),
        ("slurm", {"options": {"requeues": "many"}}, "requeues"),
        ("slurm", {"image": "x"}, "runs no containers"),
        ("torchrun", {"image": "x"}, "no container"),
        ("torchrun", {"options": {"port": "abc"}}, "port"),
        ("kubernetes", {"image": None}, "image is missing"),
        ("azureml", {"image": None}, "image is missing"),
        ("azureml", {"gpus_per_node": 3}, "1 or 2 or 4 or 8"),
        ("azureml", {"gpu": "rtx4090"}, "no machine is known"),
        ("azureml", {"setup": ["echo ${{inputs.x}}"]}, "expression|replaces"),
        ("skypilot", {"options": {}}, "bucket"),
        ("skypilot", {"options": {"bucket": "s3://x", "use_spot": "maybe"}}, "yes or no"),
    ],
)
def test_what_a_target_cannot_do_gets_one_sentence(target: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words if "|" in words else re.escape(words)) as said:
        launch_files(job(target, **settings), target)
    assert "\n" not in str(said.value)


def test_a_config_that_no_machine_would_receive_or_read(config: str, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for target in ("azureml", "skypilot"):
        with pytest.raises(ValueError, match="lies outside"):
            launch_files(job(target, config=config, code="code"), target)
    Path(config).write_text("a: 1\n b: [", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2, column"):
        job("slurm", config=config)
    Path(config).write_text("just words", encoding="utf-8")
    with pytest.raises(ValueError, match="base_model"):
        job("slurm", config=config)
