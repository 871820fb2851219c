"""What a plan becomes runs: each launcher's file on two real ranks, with one rank's losses and the planned wrapper."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import cloudpickle
import pytest
import torch
from plan_cases import a_plan

from course_lib.launch import launch
from course_lib.launch.commands import Background
from course_lib.training import single
from course_tools.planning.files import write

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=2, global_batch=8, seq_len=32)
WEIGHTS = 803_968
TOLERANCE = 1e-5  # fp32, the order of sums alone differs; seen: 2e-7
ACCELERATE = {"ddp": a_plan("ddp"), "zero": a_plan("zero3"), "fsdp": a_plan("fsdp", activation_checkpointing="full")}


def environment_of(config, monkeypatch):
    """What `accelerate launch --config_file` gives its ranks, by its own code; it starts none. And how many, and how."""
    from accelerate.commands import launch as accelerate
    from accelerate.utils import launch as preparing

    chosen = []
    for name in ("multi_gpu_launcher", "deepspeed_launcher", "simple_launcher"):
        monkeypatch.setattr(accelerate, name, lambda arguments, name=name: chosen.append((name, arguments)))
    words = ["--config_file", str(config), "--main_process_port", "0", "-m", "a_program"]
    accelerate.launch_command(accelerate.launch_command_parser().parse_args(words))
    ((launcher, arguments),) = chosen
    if launcher == "deepspeed_launcher":
        environment = preparing.prepare_deepspeed_cmd_env(arguments)[1]
    else:
        environment = preparing.prepare_multi_gpu_env(arguments)
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    return launcher, int(arguments.num_processes), changed


def by_the_files(folder, environments):
    """On a rank: DeepSpeed by its JSON, the plain loop over a model that the FSDP file cuts, Accelerate by its YAMLs."""
    from accelerate.state import AcceleratorState

    from course_lib.training.data_parallel import accelerate_ddp
    from course_lib.training.sharded import accelerate_fsdp, accelerate_zero, zero

    torch.set_num_threads(1)
    told = {"deepspeed": zero.train(**SIZES, config_file=f"{folder}/ds_config.json", expect_ranks=2)}
    told["file"] = by_the_module(folder)
    programs = {"ddp": accelerate_ddp, "fsdp": accelerate_fsdp, "zero": accelerate_zero}
    for name, program in programs.items():
        os.environ.update(environments[name])
        AcceleratorState._reset_state(reset_partial_state=True)
        accumulate = {} if name == "zero" else {"gradient_accumulation_steps": 2}  # there the file says it
        told[name] = program.train(**SIZES, expect_ranks=2, **accumulate)
        for variable in environments[name]:
            del os.environ[variable]
    return told


def by_the_module(folder):
    """What a reader writes around `fsdp_plan.shard`."""
    from torch.distributed.tensor import DTensor

    from course_lib.models import tiny_llama
    from course_lib.models.data import sample_batch

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
    return {
        "losses": losses,
        "cut": all(isinstance(p, DTensor) for p in model.parameters()),
        "local": sum(p.to_local().numel() for p in model.parameters()),
        "again": model.is_gradient_checkpointing,
    }


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """The script of torchrun as a reader starts it, beside everything else: most of what it does is importing."""
    (script,) = write(
        a_plan("single", dp=1, pp=2, num_microbatches=4, micro_batch_size=2),
        "torchrun",
        tmp_path_factory.mktemp("torchrun"),
    )
    tools = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    command = Background(f"bash {script} --steps=2", PATH=tools)
    yield command
    command.end()


@pytest.fixture(scope="module")
def accelerate_says(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    with pytest.MonkeyPatch.context() as patch:
        return {
            name: environment_of(write(one, "accelerate", folder / name)[0], patch) for name, one in ACCELERATE.items()
        }


@pytest.fixture(scope="module")
def results(private_tmp, tmp_path_factory, typed, accelerate_says):
    folder = tmp_path_factory.mktemp("files")
    write(a_plan("zero2", offload="optimizer"), "deepspeed", folder)
    write(a_plan("fsdp", activation_checkpointing="full", offload="all"), "fsdp", folder)
    environments = {name: changed for name, (_, _, changed) in accelerate_says.items()}
    return launch(by_the_files, str(folder), environments, ranks=2, quiet=True, timeout=240).results


@pytest.fixture(scope="module")
def oracle(private_tmp):
    return launch(single.train, ranks=1, quiet=True, **SIZES).results[0].losses


def off_by(ours, theirs):
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def test_deepspeed_trains_by_its_json(results, oracle):
    for rank, told in enumerate(results):
        one = told["deepspeed"]
        assert (one.wrapper, one.rank, one.world_size, one.extra["stage"]) == ("DeepSpeedEngine", rank, 2, 2)
        assert one.extra["config"]["train_batch_size"] == 8 and one.extra["config"]["gradient_accumulation_steps"] == 2
        assert one.extra["on_host"]["optimizer_state"] > 0
        assert off_by(one.losses, oracle) < TOLERANCE


def test_the_fsdp_file_cuts_a_model(results, oracle):
    for told in results:
        one = told["file"]
        assert one["cut"] and one["local"] == WEIGHTS / 2 and one["again"]
        assert off_by(one["losses"], oracle) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "launcher", "wrapper"),
    [
        ("ddp", "multi_gpu_launcher", "DistributedDataParallel"),
        ("zero", "deepspeed_launcher", "DeepSpeedEngine"),
        ("fsdp", "multi_gpu_launcher", "FSDPLlamaForCausalLM"),
    ],
)
def test_accelerate_launch_starts_two_ranks_that_train_as_planned(
    name, launcher, wrapper, accelerate_says, results, oracle
):
    assert accelerate_says[name][:2] == (launcher, 2)
    for rank, told in enumerate(results):
        one = told[name]
        assert (one.wrapper, one.rank, one.world_size) == (wrapper, rank, 2)
        assert off_by(one.losses, oracle) < TOLERANCE
        if name == "zero":
            assert one.extra["stage"] == 3 and one.extra["config"]["gradient_accumulation_steps"] == 2
            assert one.extra["config"]["gradient_clipping"] == 0.0
        if name == "fsdp":
            assert one.extra["local"] == WEIGHTS / 2


def test_the_script_of_torchrun_trains_as_planned(typed, results, oracle):
    told = json.loads(next(line for line in typed.wait(240).splitlines() if line.startswith("{")))
    assert (told["wrapper"], told["world_size"]) == ("Schedule1F1B", 2)
    assert off_by(told["losses"], oracle) < TOLERANCE
