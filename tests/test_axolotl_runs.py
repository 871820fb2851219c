"""Axolotl trains by the lesson's own YAMLs on two CPU ranks; what each rank held is the proof, not an exit code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from plan_cases import a_plan
from refusals import assert_refused

from course_lib.launch import RankFailed, launch
from course_tools.axolotl import make_inputs, merged, preprocess, train, warm_axolotl, write
from course_tools.axolotl.witness import read
from course_tools.planning.files import files

pytest.importorskip("axolotl", reason="Axolotl is not installed")

ROOT = Path(__file__).resolve().parent.parent
YAMLS = ROOT / "lessons" / "07_axolotl"
STEPS = 6
SAME = 1e-5  # fp32 and the same batches: only the order of sums differs. Seen: 1.2e-7
ASKS = """
import os, psutil, subprocess
from transformers import TrainerCallback
from axolotl.integrations.base import BasePlugin

class Ask(TrainerCallback):
    def on_substep_end(self, args, state, control, **more):
        if state.global_step == 3 and os.environ["RANK"] == "1":
            here = psutil.Process()
            # as torchrun signals the process group of a rank: a worker obeys any sender but its parent
            subprocess.run(["kill", "-TERM", *(str(process.pid) for process in (*here.children(), here))])

class Asks(BasePlugin):
    def post_trainer_create(self, cfg, trainer):
        trainer.add_callback(Ask())
"""


@pytest.fixture(scope="module")
def folder(private_tmp, tmp_path_factory):
    """A working directory as the lesson's, with the model and the data made."""
    place = tmp_path_factory.mktemp("axolotl")
    shutil.copytree(YAMLS, place / "07_axolotl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        warm_axolotl()
        make_inputs("runs/axolotl")
        yield place


def settings(*overlays: str, **changes) -> dict:
    files = [f"07_axolotl/{name}.yml" for name in ("base", *overlays)]
    return merged(*files, **{"max_steps": STEPS, **changes})


@pytest.fixture(scope="module")
def oracle(folder):
    """One device; its losses are those of every method."""
    run = train(settings(), ranks=1)
    (held,) = run.witness
    assert held["local_elements"] == held["total_elements"] == held["optimizer_elements"] / 2
    return pytest.approx(run.losses, rel=SAME), held["total_elements"]


def test_a_run_that_one_ranks_sigterm_stopped_resumes_with_the_losses_of_one_device(oracle, folder, monkeypatch):
    """Rank 1 has the signal between the two batches of step 4; both ranks save after it."""
    (folder / "asks.py").write_text(ASKS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    values = settings("fsdp2", output_dir="runs/axolotl/asked")
    values["plugins"].append("course_tools.axolotl.save_on_sigterm.SaveOnSigterm")
    values["dataloader_num_workers"] = 1  # Axolotl's own default is a worker per GPU
    asked = train(values | {"plugins": [*values["plugins"], "asks.Asks"]})
    assert [held["steps"] for held in asked.witness] == [4, 4] and 4 < STEPS
    (checkpoint,) = asked.output_dir.glob("checkpoint-*")
    names = {"trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"}
    assert checkpoint.name == "checkpoint-4" and names < {path.name for path in checkpoint.iterdir()}
    resumed = train(values | {"auto_resume_from_checkpoints": True})
    assert any("checkpoint-4" in log for log in resumed.run.logs)
    losses, whole = oracle
    for held in resumed.witness:
        assert held["wrapper"] == "FSDPLlamaForCausalLM" and held["steps"] == STEPS
        assert held["local_elements"] == whole / 2 and held["optimizer_elements"] == whole  # two moments of a half
        assert held["losses"] == losses and held["losses"][-1] < held["losses"][0]


def test_tensor_parallel_cuts_the_matrices_and_keeps_the_norms(folder):
    for held in train(settings("tensor_parallel", max_steps=1)).witness:
        assert held["param_class"] == "DTensor" and "Shard" in held["placements"]
        assert 0.5 < held["local_elements"] / held["total_elements"] < 0.51


def test_qlora_under_zero_trains_by_a_plans_yaml_and_leaves_no_file(folder, private_tmp):
    choices = {"offload": "optimizer", "activation_checkpointing": "selective", "lora_rank": 4, "seq_len": 512}
    (text,) = files(a_plan("zero1", method="qlora", **choices), "axolotl", base_model="runs/axolotl/tiny").values()
    here = "datasets special_tokens dataset_prepared_path plugins optimizer save_strategy logging_steps".split()
    values = yaml.safe_load(text) | {key: settings()[key] for key in here} | {"max_steps": 2}
    run = train(values)
    assert run.losses[1] < run.losses[0]
    for held in run.witness:
        assert (held["wrapper"], held["zero_stage"], held["world_size"]) == ("DeepSpeedEngine", 1, 2)
        assert held["quantized"] == 2 * 7  # matrices of two blocks
        assert held["optimizer_elements"] == held["trainable_elements"]  # two moments of half the adapters
    assert not list(Path(private_tmp).glob("*.json")), "DeepSpeed's configuration from the YAML"


@pytest.mark.parametrize("overlay", ["fsdp2", "zero3"])
def test_a_killed_run_resumes_its_shards_and_its_dropout_to_the_last_bit(overlay: str, folder: Path) -> None:
    """As lesson 7 says of all its overlays; its own cells run DDP."""
    often = {"max_steps": 4, "save_steps": 2, "overrides_of_model_config": {"attention_dropout": 0.1}}
    if overlay == "fsdp2":
        often["fsdp_config"] = {"state_dict_type": "SHARDED_STATE_DICT"}  # as on its cluster
    values = merged(*(YAMLS / f"{name}.yml" for name in ("base", overlay, "saving")), **often)
    whole = train(values | {"output_dir": f"whole-{overlay}"})
    with pytest.raises(RankFailed, match="SIGKILL"):
        train(values, die_at=4)
    assert {path.name for path in Path(values["output_dir"]).glob("checkpoint-*")} == {"checkpoint-2"}
    resumed = train(values)
    assert resumed.losses == whole.losses and resumed.witness == whole.witness


def test_overlays_merge_deep_replace_lists_and_take_away(tmp_path):
    base = {"a": {"x": 1, "y": 2}, "list": [1, 2], "gone": 3}
    result = merged(base, {"a": {"y": 3}, "list": [4], "gone": None}, b=5)
    assert result == {"a": {"x": 1, "y": 3}, "list": [4], "b": 5}
    assert base == {"a": {"x": 1, "y": 2}, "list": [1, 2], "gone": 3}
    assert merged(write(result, tmp_path / "deep" / "run.yml")) == result


def test_what_cannot_be_run_is_refused(folder, tmp_path):
    (tmp_path / "open.yml").write_text("a: [1, 2\nb: 3\n")
    (tmp_path / "list.yml").write_text("- 1\n- 2\n")
    assert_refused(
        [
            (lambda: train(settings(micro_batch_size="two"), ranks=1), RankFailed, "micro_batch_size"),
            (lambda: merged(tmp_path / "open.yml"), ValueError, "line 2, column"),
            (lambda: merged(tmp_path / "list.yml"), ValueError, "list"),
            (lambda: merged(tmp_path / "none.yml"), ValueError, "none.yml"),
            (lambda: train({"base_model": "x"}), ValueError, "output_dir"),
            (lambda: train({"output_dir": str(tmp_path)}), ValueError, "Witness"),
            (lambda: preprocess({"output_dir": "x"}), ValueError, "dataset_prepared_path"),
            (lambda: read(tmp_path), FileNotFoundError, str(tmp_path)),
        ]
    )


def test_the_cpu_adapter_is_inert_where_there_is_cuda(folder):
    """On a rank with a pretended GPU; every training of this file shows that it works without one."""

    def adapted():
        import os

        import torch
        from accelerate import ParallelismConfig
        from accelerate.state import PartialState

        before = PartialState._prepare_backend, ParallelismConfig.build_device_mesh
        names = {"ACCELERATE_TORCH_DEVICE", "DS_ACCELERATOR"}
        for name in names:
            os.environ.pop(name, None)
        torch.cuda.is_available = lambda: True
        import course_tools.axolotl.cpu_ranks  # noqa: F401

        after = PartialState._prepare_backend, ParallelismConfig.build_device_mesh
        return before != after or bool(names & set(os.environ))

    assert launch(adapted, ranks=2, quiet=True, timeout=120).results == [False, False]
