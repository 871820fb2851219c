"""Accelerate's FSDP2 plugin against our own program, its ways to shard nothing, and both from the command line."""

from __future__ import annotations

import json
import sys

import cloudpickle
import pytest
import torch
from parity import TOLERANCE, off_by

from course_lib.launch import launch
from course_lib.launch.commands import Background
from course_lib.training import single
from course_lib.training.sharded import accelerate_fsdp, accelerate_on_cpu, fsdp

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=3, global_batch=8, seq_len=32)
# a setting of Accelerate's program, and the same of ours
SETTINGS = {
    "yes": (dict(max_grad_norm=1.0), dict(max_grad_norm=1.0)),
    "no": (dict(reshard_after_forward=False, offload=True), dict(reshard_after_forward="no", offload=True)),
    "accumulate": (dict(gradient_accumulation_steps=2), dict(gradient_accumulation_steps=2)),
    "bf16-mixed": (dict(precision="bf16-mixed"), None),
}


def said_by(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def with_cpu_true():
    """What a reader writes first: the plugin, and ``cpu=True`` because there is no GPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_fsdp.make_accelerator, ours = (
        lambda **_: Accelerator(cpu=True, fsdp_plugin=accelerate_fsdp.FullyShardedDataParallelPlugin(fsdp_version=2)),
        accelerate_fsdp.make_accelerator,
    )
    try:
        accelerate_fsdp.train(**SIZES)
    finally:
        accelerate_fsdp.make_accelerator = ours


def without_the_adapter():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerate_fsdp.let_cpu_ranks_shard, ours = lambda: None, accelerate_fsdp.let_cpu_ranks_shard
    try:
        accelerate_fsdp.train(**SIZES)
    finally:
        accelerate_fsdp.let_cpu_ranks_shard = ours


def both():
    torch.set_num_threads(1)
    trained = {
        name: (accelerate_fsdp.train(**SIZES, **theirs), fsdp.train(**SIZES, **ours) if ours is not None else None)
        for name, (theirs, ours) in SETTINGS.items()
    }
    return trained, {
        "another number": said_by(accelerate_fsdp.train, **SIZES, expect_ranks=3),
        "precision": said_by(accelerate_fsdp.train, **SIZES, precision="fp8"),
        "batch": said_by(accelerate_fsdp.train, **SIZES | dict(global_batch=7)),
        "cpu=True": said_by(with_cpu_true),
        "no adapter": said_by(without_the_adapter),
    }


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Both at the same time: most of what they do is importing."""
    options = "--steps 3 --global-batch 8 --seq-len 32"
    file = tmp_path_factory.mktemp("configuration") / "fsdp2.yaml"
    file.write_text(json.dumps({**accelerate_fsdp.CONFIGURATION, "num_processes": 2}))
    program = "-m course_lib.training.sharded.accelerate_fsdp"
    started = {
        "python": Background(f"python -m course_lib.training.sharded.fsdp {options} --meta-init"),
        "accelerate": Background(f"accelerate launch --config_file {file} {program} {options} --expect-ranks 2"),
    }
    yield started
    for command in started.values():
        command.end()


@pytest.fixture(scope="module")
def runs(private_tmp, commands):
    return launch(both, ranks=2, quiet=True, timeout=280)


@pytest.fixture(scope="module")
def oracle(private_tmp):
    return launch(single.train, ranks=1, quiet=True, **SIZES).results[0].losses


@pytest.mark.parametrize("name", [name for name, (_, ours) in SETTINGS.items() if ours is not None])
def test_accelerate_s_plugin_trains_as_our_program_does(name, runs, oracle):
    for rank, (trained, _) in enumerate(runs.results):
        theirs, ours = trained[name]
        for outcome in (theirs, ours):
            assert (outcome.wrapper, outcome.rank, outcome.world_size) == ("FSDPLlamaForCausalLM", rank, 2)
            assert outcome.extra["local"] == 803_968 / 2
        assert off_by(theirs.losses, ours.losses) < TOLERANCE
        assert off_by(theirs.losses, oracle) < TOLERANCE or name == "yes"  # which clips
        assert (
            off_by(theirs.extra["gradient_norms"], ours.extra["gradient_norms"]) < TOLERANCE if name == "yes" else True
        )
        for what in ("parameters", "gradients", "optimizer_state"):
            assert theirs.memory[what] == ours.memory[what]
        # its units are more and smaller (embedding, norm and head by themselves), what they carry is the same
        assert theirs.wire_bytes is None or theirs.wire_bytes == pytest.approx(ours.wire_bytes, rel=0.03)
        assert theirs.extra["units"] > ours.extra["units"]


def test_its_mixed_precision_computes_in_bf16(runs, oracle):
    for trained, _ in runs.results:
        assert 1e-6 < off_by(trained["bf16-mixed"][0].losses, oracle) < 1e-2


def test_whatever_shards_nothing_is_told(runs):
    for _, said in runs.results:
        assert "RuntimeError: asked for FSDP2 and got DistributedDataParallel" in said["cpu=True"]
        assert "RuntimeError: asked for FSDP2 on several ranks and Accelerate gave 1" in said["no adapter"]
        assert "asked for FSDP2 on 3 ranks and Accelerate gave 2" in said["another number"]
        assert "torchrun" in said["another number"]
        assert "ValueError: precision='fp8'" in said["precision"]
        assert "ValueError: global_batch=7 does not divide into 2 ranks" in said["batch"]


def test_one_process_is_not_several(private_tmp):
    (said,) = launch(said_by, accelerate_fsdp.train, ranks=1, quiet=True, **SIZES).results
    assert said.startswith("RuntimeError: asked for FSDP2 on several ranks and Accelerate gave 1")


def test_with_a_gpu_the_adapter_does_nothing(monkeypatch):
    touched = []
    monkeypatch.setattr(accelerate_on_cpu, "PartialState", lambda **_: touched.append("state"))
    monkeypatch.setattr(accelerate_on_cpu.AcceleratorState, "_reset_state", lambda **_: touched.append("reset"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    accelerate_on_cpu.let_cpu_ranks_shard()
    assert not touched


def outcome_of(output):
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@pytest.mark.parametrize(("name", "ranks"), [("python", 1), ("accelerate", 2)])
def test_the_command_line_runs_the_same_training(name, ranks, commands, oracle):
    told = outcome_of(commands[name].wait())
    assert (told["wrapper"], told["rank"], told["world_size"]) == ("FSDPLlamaForCausalLM", 0, ranks)
    assert told["extra"]["local"] == 803_968 / ranks
    assert off_by(told["losses"], oracle) < TOLERANCE
