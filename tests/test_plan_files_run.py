"""What a plan becomes runs: one file of each kind on two real ranks, with one rank's losses and the planned wrapper."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import cloudpickle
import pytest
import torch
from plan_cases import HUGE, a_plan

from course_lib.launch import launch
from course_lib.launch.commands import Background
from course_lib.training import single
from course_tools.planning import small_run
from course_tools.planning.files import write

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=2, global_batch=8, seq_len=32)
WEIGHTS = 803_968
with_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.fixture(scope="module")
def oracle(private_tmp):
    """One rank's losses."""
    losses = launch(single.train, ranks=1, quiet=True, **SIZES).results[0].losses
    return pytest.approx(losses, rel=1e-5)  # fp32, the order of sums alone differs; seen: 2e-7


def typed(command):
    """What rank 0 says of itself, when this is typed in a shell."""
    running = Background(command, PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    try:
        return json.loads(next(line for line in running.wait(240).splitlines() if line.startswith("{")))
    finally:
        running.end()


def by_the_module(folder):
    """On a rank: what a reader writes around `fsdp_plan.shard`."""
    from torch.distributed.tensor import DTensor

    from course_lib.models import tiny_llama
    from course_lib.models.data import sample_batch

    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    import fsdp_plan

    rank, losses = torch.distributed.get_rank(), []
    model = fsdp_plan.shard(tiny_llama().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(SIZES["steps"]):
        batch = sample_batch(step, global_batch=8, seq_len=32, rank=rank, world_size=fsdp_plan.RANKS)
        total = torch.zeros(())
        for i, part in enumerate(batch.chunk(fsdp_plan.GRADIENT_ACCUMULATION_STEPS)):
            model.set_requires_gradient_sync(i == fsdp_plan.GRADIENT_ACCUMULATION_STEPS - 1)
            loss = model(input_ids=part, labels=part).loss / fsdp_plan.GRADIENT_ACCUMULATION_STEPS
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / 2)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    return losses, local, model.is_gradient_checkpointing


def test_the_fsdp_file_shards_a_model(oracle, tmp_path):
    write(a_plan("fsdp", activation_checkpointing="full", offload="all"), "fsdp", tmp_path)
    for losses, local, checkpointing in launch(by_the_module, str(tmp_path), ranks=2, quiet=True, timeout=240).results:
        assert losses == oracle and local == WEIGHTS / 2 and checkpointing


def test_accelerate_launch_trains_by_its_yaml(oracle, tmp_path):
    (config,) = write(a_plan("fsdp", activation_checkpointing="full"), "accelerate", tmp_path)
    program = "course_lib.training.sharded.accelerate_fsdp --steps=2 --seq-len=32 --gradient-accumulation-steps=2"
    result = typed(f"accelerate launch --config_file {config} --main_process_port 0 -m {program}")
    assert (result["wrapper"], result["world_size"]) == ("FSDPLlamaForCausalLM", 2)
    assert result["losses"] == oracle and result["extra"]["local"] == WEIGHTS / 2


@with_deepspeed
def test_deepspeed_trains_by_its_json(oracle, tmp_path):
    from course_lib.training import zero

    (config,) = write(a_plan("zero2", offload="optimizer"), "deepspeed", tmp_path)
    run = launch(zero.train, str(config), steps=2, seq_len=32, ranks=2, quiet=True, timeout=240)
    for outcome in run.results:
        assert (outcome.wrapper, outcome.world_size) == ("DeepSpeedEngine", 2)
        assert outcome.extra["on_host"]["optimizer_state"] > 0
        assert outcome.losses == oracle


def test_the_script_of_torchrun_trains_as_planned(oracle, tmp_path):
    (script,) = write(a_plan("single", dp=1, pp=2, num_microbatches=4), "torchrun", tmp_path)
    result = typed(f"bash {script} --steps=2")
    assert (result["wrapper"], result["world_size"]) == ("Schedule1F1B", 2)
    assert result["losses"] == oracle


@with_deepspeed
def test_the_script_of_torchrun_finds_deepspeed_s_json_beside_itself(oracle, tmp_path):
    script, _ = write(a_plan("zero2", offload="optimizer"), "torchrun", tmp_path / "a plan")
    result = typed(f"bash '{script}' --steps=2")
    assert (result["wrapper"], result["world_size"]) == ("DeepSpeedEngine", 2)
    assert result["losses"] == oracle


def test_a_frontier_plan_run_small_keeps_its_split_and_has_one_ranks_losses(oracle):
    result = small_run.run(HUGE, ranks=4, steps=2)
    assert (result.grid.pp, result.grid.tp, result.grid.size) == (2, 2, 4)
    assert [outcome.rank for outcome in result.outcomes] == [0, 1, 2, 3]
    assert {outcome.wrapper for outcome in result.outcomes} == {"LlamaStage"}
    assert result.losses == oracle == small_run.one_rank(result)
    assert "llama-3.1-405b" in result.sentence and "bf16-mixed to fp32" in result.sentence
