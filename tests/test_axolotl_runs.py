"""Axolotl trains by the lesson's own YAMLs on two CPU ranks; what each rank held is the proof, not an exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from course_lib.launch import RankFailed
from course_tools.axolotl import (
    AxolotlRun,
    inference,
    make_inputs,
    merge_lora,
    merged,
    preprocess,
    train,
    warm_axolotl,
    write,
)
from course_tools.axolotl.witness import read

YAMLS = Path(__file__).resolve().parent.parent / "lessons" / "07_axolotl"
STEPS = 20  # of the methods that must agree
SHORT = 3
# fp32 and the same batches: only the order of sums differs. Seen: 1.2e-7, one unit in the last place of a loss.
SAME = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory, monkeypatch_module):
    """A working directory as the lesson's, with the model and the data made."""
    where = tmp_path_factory.mktemp("axolotl")
    shutil.copytree(YAMLS, where / "07_axolotl")
    monkeypatch_module.chdir(where)
    warm_axolotl()
    make_inputs("runs/axolotl")
    return where


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def trained(folder):
    """Runs by the names of their overlays, each made once."""
    done: dict[tuple[str, ...], AxolotlRun] = {}

    def run(*overlays: str, ranks: int = 2, **changes) -> AxolotlRun:
        key = (*overlays, changes.get("output_dir", ""))
        if key not in done:
            files = [f"07_axolotl/{name}.yml" for name in ("base", *overlays)]
            done[key] = train(merged(*files, **changes), ranks=ranks)
        return done[key]

    return run


@pytest.fixture(scope="module")
def oracle(trained):
    return trained(ranks=1, max_steps=STEPS)


# (overlay, wrapper, ZeRO's stage, weights on a rank, Adam's moments on a rank; both as shares of the whole model)
METHODS = [
    ("ddp", "DistributedDataParallel", None, 1, 2),
    ("fsdp2", "FSDPLlamaForCausalLM", None, 1 / 2, 1),
    ("zero1", "DeepSpeedEngine", 1, 1, 1),
    ("zero2", "DeepSpeedEngine", 2, 1, 1),
    ("zero3", "DeepSpeedEngine", 3, 1 / 2, 1),
]


@pytest.mark.parametrize(("overlay", "wrapper", "stage", "weights", "moments"), METHODS)
def test_a_method_has_the_losses_of_one_device_and_holds_its_share(
    oracle, trained, overlay, wrapper, stage, weights, moments
):
    run = trained(overlay, max_steps=STEPS)
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(oracle.losses, rel=SAME)
    assert run.losses[-1] < run.losses[0]
    whole = oracle.witness[0]["total_elements"]
    assert oracle.witness[0]["local_elements"] == whole and oracle.witness[0]["optimizer_elements"] == 2 * whole
    assert len(run.witness) == 2
    for held in run.witness:
        assert (held["wrapper"], held["zero_stage"], held["world_size"]) == (wrapper, stage, 2)
        assert held["total_elements"] == whole
        assert held["local_elements"] == weights * whole
        assert held["optimizer_elements"] == moments * whole


def test_deepspeeds_configuration_in_the_yaml_leaves_no_file_behind(oracle, trained, folder):
    written = json.loads((folder / "07_axolotl/zero2.json").read_text())
    before = set(Path(tempfile.gettempdir()).iterdir())
    marked = written | {"steps_per_print": 1_234_567}  # tells our files from those of tests that run beside this one
    run = trained(deepspeed=marked, max_steps=SHORT, gradient_accumulation_steps=2, output_dir="runs/axolotl/inline")
    assert [held["zero_stage"] for held in run.witness] == [2, 2]
    assert run.losses[0] == pytest.approx(oracle.losses[0], rel=SAME)
    left = set(Path(tempfile.gettempdir()).iterdir()) - before
    assert not [path for path in left if path.suffix == ".json" and "1234567" in path.read_text()]


def test_tensor_parallel_cuts_the_matrices_and_keeps_the_norms(oracle, trained):
    run = trained("tensor_parallel", max_steps=SHORT)
    assert run.losses[0] == pytest.approx(oracle.losses[0], rel=SAME)  # later ones have another learning-rate schedule
    for held in run.witness:
        assert held["param_class"] == "DTensor" and "Shard" in held["placements"]
        assert 0.5 < held["local_elements"] / held["total_elements"] < 0.51
    kinds = {one.kind for one in run.run.collectives}
    assert "all_reduce" in kinds


def test_lora_trains_the_adapter_alone_and_merges_into_its_base(trained):
    run = trained("lora", max_steps=SHORT, learning_rate=0.01)
    held = run.witness[0]
    assert held["wrapper"] == "DistributedDataParallel"
    assert 0 < held["trainable_elements"] < held["total_elements"] / 10
    assert held["optimizer_elements"] == 2 * held["trainable_elements"]
    config = merged("07_axolotl/base.yml", "07_axolotl/lora.yml")
    folder = merge_lora(config)
    from safetensors.torch import load_file

    base, done = (load_file(Path(name, "model.safetensors")) for name in ("runs/axolotl/tiny", folder))
    assert base.keys() == done.keys()
    changed = {name for name in base if not (base[name] == done[name]).all()}
    assert changed and all("proj" in name for name in changed)
    assert "Zero" in inference(config, "Zero", base_model=folder)


def test_qlora_stores_four_bits(trained):
    held = trained("qlora", max_steps=SHORT).witness[0]
    assert held["quantized"] == 2 * 7  # the projections of two blocks
    lora = trained("lora", max_steps=SHORT).witness[0]
    assert held["trainable_elements"] == lora["trainable_elements"]
    assert held["total_elements"] < lora["total_elements"] / 2  # two weights in a byte


def test_overlays_add_up(trained):
    held = trained("fsdp2", "lora", max_steps=SHORT).witness[0]
    assert held["param_class"] == "DTensor" and held["trainable_elements"] < held["total_elements"] / 10
    assert held["local_elements"] == held["total_elements"] / 2


def test_packing_fills_the_rows(trained, folder):
    import re

    run = trained("packing", max_steps=SHORT)
    assert len(run.losses) == SHORT
    rows = int(re.search(r"gather_len_batches: \[(\d+)", run.run.logs[0])[1])
    texts = len((folder / "runs/axolotl/instructions.jsonl").read_text().splitlines())
    assert texts / 6 < rows < texts / 4  # four to five texts a row; 80 rows where a rank alone would have 395


def test_preprocess_prepares_what_training_then_reads(folder):
    prepared = preprocess(merged("07_axolotl/base.yml", dataset_prepared_path="runs/axolotl/anew"))
    assert any(prepared.rglob("*.arrow"))


def test_the_same_yaml_trains_by_axolotls_own_command(folder, oracle):
    """As a terminal would: torchrun starts the ranks, and the plugins in the YAML do the rest."""
    config = merged("07_axolotl/base.yml", "07_axolotl/fsdp2.yml", max_steps=SHORT, output_dir="runs/axolotl/command")
    write(config, "command.yml")
    root = str(YAMLS.parent.parent)
    environment = os.environ | {
        "PYTHONPATH": root,
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "NUMBA_DISABLE_JIT": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
    }
    words = ["train", "command.yml", "--launcher", "torchrun", "--", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.main", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = read("runs/axolotl/command")
    assert [held["wrapper"] for held in told] == ["FSDPLlamaForCausalLM"] * 2
    assert told[0]["local_elements"] * 2 == told[0]["total_elements"]
    assert told[0]["losses"][0] == pytest.approx(oracle.losses[0], rel=SAME)


def test_a_yaml_that_axolotl_refuses_says_why(folder):
    with pytest.raises(RankFailed, match="micro_batch_size"):
        train(merged("07_axolotl/base.yml", micro_batch_size="two"), ranks=1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1, 2\nb: 3\n", r"line 2, column 2: did not find expected"),
        ("- 1\n- 2\n", "holds a list"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, sentence):
    file = tmp_path / "run.yml"
    file.write_text(text)
    with pytest.raises(ValueError, match=sentence.replace("did not find expected", ".*")):
        merged(file)


def test_bad_input_gets_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        merged(tmp_path / "none.yml")
    with pytest.raises(ValueError, match="no output_dir"):
        train({"base_model": "x"})
    with pytest.raises(ValueError, match="Witness"):
        train({"output_dir": str(tmp_path)})
    with pytest.raises(ValueError, match="no dataset_prepared_path"):
        preprocess({"output_dir": "x"})
    with pytest.raises(ValueError, match="no adapter_config"):
        merge_lora({"output_dir": str(tmp_path)})
    with pytest.raises(ValueError, match="Give a prompt"):
        inference({}, "  ", base_model="x")
    with pytest.raises(FileNotFoundError, match="no witness"):
        read(tmp_path)


def test_overlays_merge_deep_replace_lists_and_take_away(tmp_path):
    base = {"a": {"x": 1, "y": 2}, "list": [1, 2], "gone": 3}
    made = merged(base, {"a": {"y": 3}, "list": [4], "gone": None}, b=5)
    assert made == {"a": {"x": 1, "y": 3}, "list": [4], "b": 5}
    assert base == {"a": {"x": 1, "y": 2}, "list": [1, 2], "gone": 3}
    assert merged(write(made, tmp_path / "deep" / "run.yml")) == made


@pytest.mark.parametrize("gpu", [False, True])
def test_the_adapter_answers_for_cpu_ranks_and_is_inert_where_there_is_cuda(gpu):
    """In a process of its own, on a CUDA build of PyTorch as it looks without a GPU, or with a pretended one."""
    program = f"""
import json, os, torch
import axolotl.integrations.base
from accelerate import ParallelismConfig
from accelerate.state import PartialState
from axolotl.utils import trainer
before, mesh = PartialState._prepare_backend, ParallelismConfig.build_device_mesh
torch.cuda.is_available = lambda: {gpu}  # not earlier: a CPU build of PyTorch cannot be imported through with True
def ask(*devices):
    if {gpu}:
        return False
    raise RuntimeError("Found no NVIDIA driver on your system.")  # a CPU build raises AssertionError
torch.cuda.can_device_access_peer = ask
import course_tools.axolotl.cpu_ranks as adapter
adapter.let_cpu_ranks_train()
same = [PartialState._prepare_backend is before, ParallelismConfig.build_device_mesh is mesh]
peers = trainer.check_cuda_p2p_ib_support()
print(json.dumps([*same, peers, os.environ.get("ACCELERATE_TORCH_DEVICE"), os.environ.get("DS_ACCELERATOR")]))
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("ACCELERATE_TORCH_DEVICE", "DS_ACCELERATOR")}
    environment |= {"WORLD_SIZE": "2", "AXOLOTL_DO_NOT_TRACK": "1", "PYTHONPATH": str(YAMLS.parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = [True, True, False, None, None] if gpu else [False, False, True, "cpu", "cpu"]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
