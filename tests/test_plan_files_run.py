"""What a plan becomes runs: one file of each kind on two real ranks, with one rank's losses and the planned wrapper."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import cloudpickle
import pytest
from plan_cases import a_plan

from course_lib.launch import launch
from course_lib.launch.commands import Background, shell
from course_lib.training import single
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


# Put into the script: what a rank holds once it is wrapped.
PROBE = """
    held = sum(getattr(weight, "to_local", lambda: weight)().numel() for weight in model.parameters())
    if rank == 0:
        print(json.dumps({"held": held, "checkpointing": getattr(model, "is_gradient_checkpointing", False)}))
"""
SMALL = 66_688  # of the weights those of embedding, head and norms, which tensor parallelism does not split
SCRIPTS = {
    "fsdp": (a_plan(activation_checkpointing="full", offload="all"), WEIGHTS / 2),
    "ddp": (a_plan("ddp"), WEIGHTS),
    "two copies": (a_plan(dp=4, copies=2, micro_batch_size=1, on="4xcpu"), WEIGHTS / 2),
    "tensor parallel": (a_plan(tp=2, on="4xcpu"), (WEIGHTS - SMALL) / 4 + SMALL / 2),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_torchrun_trains_by_its_script(oracle, tmp_path, name):
    plan, held = SCRIPTS[name]
    (script,) = write(plan, "torchrun", tmp_path)
    before, optimizer, after = script.read_text().partition("    optimizer = ")
    script.write_text(before + PROBE + optimizer + after)
    printed = shell(f"torchrun --nproc-per-node {plan.gpus} {script}", timeout=240).splitlines()
    wrapped, *steps = [json.loads(line) for line in printed if line.startswith("{")]
    assert wrapped == {"held": held, "checkpointing": plan.activation_checkpointing == "full"}
    assert [step["loss"] for step in steps[:2]] == oracle


# What a reader writes: the launcher's YAML says how to shard.
SCRIPT = """
import json
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from course_lib.launch.group import end_process
from course_lib.models import tiny_llama
from course_lib.models.data import GlobalBatches
from course_lib.on_cpu.accelerate import let_cpu_ranks_shard
from course_lib.on_cpu.deepspeed import assert_sharded, prepare_deepspeed

let_cpu_ranks_shard()
accelerator = Accelerator(gradient_accumulation_steps=2)
by_deepspeed = accelerator.state.deepspeed_plugin is not None
if by_deepspeed:
    prepare_deepspeed()
model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = GlobalBatches(2, global_batch=8, seq_len=32)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
local = assert_sharded(model) if by_deepspeed else sum(p.to_local().numel() for p in model.parameters())
if accelerator.is_main_process:
    ranks = accelerator.num_processes
    print(json.dumps({"wrapper": type(model).__name__, "ranks": ranks, "losses": losses, "local": local}))
end_process(0)  # an exit with clean-up may meet gloo's threads, which outlive FSDP2's groups
"""


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero2", marks=with_deepspeed)])
def test_accelerate_launch_trains_by_its_yaml(oracle, tmp_path, strategy):
    (config,) = write(a_plan(strategy, activation_checkpointing="full"), "accelerate", tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    told = typed(f"accelerate launch --config_file {config} --main_process_port 0 {tmp_path}/script.py")
    assert told["wrapper"] == {"fsdp": "FSDPLlamaForCausalLM", "zero2": "DeepSpeedEngine"}[strategy]
    assert (told["ranks"], told["local"]) == (2, WEIGHTS / 2)
    losses = told["losses"]
    assert [sum(losses[:2]) / 2, sum(losses[2:]) / 2] == oracle  # of two micro-batches each


@with_deepspeed
def test_deepspeed_trains_by_its_json(oracle, tmp_path):
    from course_lib.training import zero

    (config,) = write(a_plan("zero2", offload="optimizer"), "deepspeed", tmp_path)
    run = launch(zero.train, str(config), steps=2, seq_len=32, ranks=2, quiet=True, timeout=240)
    for outcome in run.results:
        assert (outcome.wrapper, outcome.world_size) == ("DeepSpeedEngine", 2)
        assert outcome.extra["on_host"]["optimizer_state"] > 0
        assert outcome.losses == oracle
