"""What a plan becomes: each file says what the plan says, its program takes it, and what cannot be said is refused."""

from __future__ import annotations

import importlib
import json
import shlex
from dataclasses import replace

import pytest
import yaml
from plan_cases import LLAMA, a_plan

from course_lib.training.command_line import parse
from course_lib.training.sharded.zero_config import batch_sizes, check_config
from course_tools.axolotl.check import check
from course_tools.planning import machines, plan
from course_tools.planning.files import TARGETS, files, program_of, targets_of, why_not, write

# Every program of the course, by a plan that it runs
PROGRAMS = {
    "single": a_plan("single", dp=1, on="1xcpu"),
    "qlora": a_plan("single", dp=1, on="1xcpu", method="qlora", seq_len=256, activation_checkpointing="selective"),
    "ddp": a_plan("ddp"),
    "zero": a_plan("zero3", activation_checkpointing="full", offload="all"),
    "fsdp": a_plan("fsdp", method="lora", activation_checkpointing="selective"),
    "tensor_parallel": a_plan("single", dp=1, tp=2, num_microbatches=1, sequence_parallel=True),
    "pipeline_parallel": a_plan("single", dp=1, pp=2, virtual_stages=3, num_microbatches=4),
    "context_parallel": a_plan("ddp", dp=1, cp=2, seq_len=4096, num_microbatches=1),
    "three_d": a_plan("zero1", tp=2, pp=8, dp=4, on="8x8xcpu", num_microbatches=8),
}


def text_of(one, target, **how):
    (text,) = files(one, target, **how).values()
    return text


def words_of(text):
    """What torchrun's script gives to the program, and the program."""
    line = text[text.index("exec ") :].replace("\\\n", " ").replace('"$@"', "")
    words = shlex.split(line)
    at = words.index("-m")
    return words[1:at], words[at + 1], words[at + 2 :]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_line_of_torchrun_is_one_that_the_program_takes(name: str) -> None:
    one = PROGRAMS[name]
    launcher, module, words = words_of(text_of(one, "torchrun"))
    meant, arguments = program_of(one)
    assert module == meant and meant.startswith("course_lib.training.") and meant.endswith(f".{name}")
    taken = parse(importlib.import_module(module).train, words)
    for key, value in arguments.items():
        assert taken[key] == value and type(taken[key]) is type(value), key
    ranks = one.dp * one.tp * one.pp * one.cp
    nodes = max(1, ranks // one.machines.per_node)
    assert f"--nnodes={nodes}" in launcher and f"--nproc_per_node={ranks // nodes}" in launcher


def test_the_grid_and_the_batch_arrive() -> None:
    module, given = program_of(PROGRAMS["three_d"])
    assert (given["dp"], given["pp"], given["tp"], given["shard_data"]) == (4, 8, 2, True)
    assert (given["global_batch"], given["num_microbatches"], given["layers"]) == (64, 8, 8)
    assert program_of(replace(PROGRAMS["three_d"], strategy="ddp"))[1]["shard_data"] is False
    assert program_of(PROGRAMS["pipeline_parallel"])[1] == {
        "steps": 20,
        "global_batch": 8,
        "seq_len": 32,
        "schedule": "interleaved",
        "num_microbatches": 4,
        "virtual_stages": 3,
        "layers": 6,
    }
    batch = {"steps": 20, "global_batch": 8, "seq_len": 32, "gradient_accumulation_steps": 2}
    assert program_of(PROGRAMS["ddp"])[1] == batch
    assert program_of(PROGRAMS["zero"])[1] == batch | {
        "stage": 3,
        "precision": "fp32",
        "offload": "all",
        "activation_checkpointing": "full",
    }
    assert program_of(PROGRAMS["fsdp"])[1] == batch | {
        "method": "lora",
        "model": "tiny",
        "precision": "fp32",
        "offload": False,
        "activation_checkpointing": "selective",
        "lora_rank": 16,
    }
    assert program_of(PROGRAMS["context_parallel"])[1]["seq_len"] == 512  # the tiny model knows no longer ones
    real = program_of(a_plan("single", dp=1, on="rtx4090", **{k: v for k, v in LLAMA.items() if k != "on"}), model="x")
    assert real[0] == "course_lib.training.finetune.qlora" and real[1]["method"] == "full" and real[1]["model"] == "x"


def test_several_machines_meet_at_the_first(tmp_path) -> None:
    (script,) = write(a_plan("fsdp", dp=16, **LLAMA | {"on": "2x8xh100-80gb"}), "torchrun", tmp_path / "new")
    text = script.read_text()
    launcher, _, words = words_of(text)
    assert "--rdzv_endpoint=$endpoint" in launcher and "--rdzv_id=plan" in launcher and 'endpoint="${1:?' in text
    assert "--model=meta-llama/Llama-3.1-8B" in words and '"$@"' in text
    with pytest.raises(ValueError, match="is a file: name a folder"):
        write(a_plan("ddp"), "torchrun", script)


def test_what_a_program_does_not_do_stands_in_the_comment() -> None:
    text = text_of(a_plan("ddp", activation_checkpointing="full", **LLAMA), "torchrun")
    assert "# course_lib.training.data_parallel.ddp trains the course's tiny Llama" in text
    assert "# It computes in fp32 and keeps all activations, whatever the plan says." in text
    assert "FSDP2 instead of ZeRO-1" in text_of(PROGRAMS["three_d"], "torchrun")
    assert "whatever the plan says" not in text_of(PROGRAMS["fsdp"], "torchrun")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_deepspeed_s_json_is_sound(stage: int, offload: str) -> None:
    if offload == "all" and stage < 3:
        return
    one = a_plan(f"zero{stage}", dp=2, micro_batch_size=3, num_microbatches=4, offload=offload, **LLAMA)
    config = json.loads(text_of(one, "deepspeed"))
    check_config(config, ranks=2)
    assert batch_sizes(config, ranks=2) == (24, 3, 4)
    assert config["gradient_clipping"] == 0.0 and config["bf16"] == {"enabled": True} and "optimizer" not in config
    zero = config["zero_optimization"]
    assert zero["stage"] == stage
    assert ("offload_optimizer" in zero, "offload_param" in zero) == (offload != "none", offload == "all")
    assert "bf16" not in json.loads(text_of(replace(one, precision="fp32"), "deepspeed"))


def test_accelerate_s_own_loader_takes_each_kind(tmp_path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    options = vars(launch_command_parser().parse_args(["script.py"]))
    for strategy, kind in {"ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "fsdp": "FSDP"}.items():
        one = a_plan(strategy, dp=16, activation_checkpointing="full", **LLAMA | {"on": "2x8xh100-80gb"})
        (path,) = write(one, "accelerate", tmp_path)
        read = load_config_from_file(str(path))  # an unknown key is an error there
        assert (read.distributed_type.value, read.num_processes, read.num_machines) == (kind, 16, 2)
        assert read.mixed_precision == "bf16" and not read.use_cpu
        assert set(read.fsdp_config) | set(read.deepspeed_config) <= set(options)  # it reads past others in silence
        assert path.read_text().startswith("# Plan: llama-3.1-8b, full training by ")
        assert "batch_size=2, Accelerator(gradient_accumulation_steps=2)" in path.read_text()
    assert read.fsdp_config["fsdp_version"] == 2 and read.fsdp_config["fsdp_activation_checkpointing"] is True
    assert read.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    assert yaml.safe_load(text_of(a_plan("single", dp=1, on="1xcpu"), "accelerate"))["distributed_type"] == "NO"


def test_axolotl_s_yaml_is_the_plan() -> None:
    one = a_plan(
        "zero2",
        method="qlora",
        num_microbatches=8,
        activation_checkpointing="selective",
        lora_rank=32,
        offload="optimizer",
        **LLAMA,
    )
    found = yaml.safe_load(text_of(one, "axolotl"))
    assert (found["micro_batch_size"], found["gradient_accumulation_steps"], found["sequence_len"]) == (2, 8, 2048)
    assert (found["adapter"], found["load_in_4bit"], found["lora_r"], found["bf16"]) == ("qlora", True, 32, True)
    assert found["deepspeed"]["zero_optimization"]["stage"] == 2
    assert found["deepspeed"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert found["deepspeed"]["gradient_clipping"] == found["deepspeed"]["train_batch_size"] == "auto"
    assert found["gradient_checkpointing"] and "aten::mm" in found["selective_checkpointing"]["save"]
    tensor = yaml.safe_load(text_of(a_plan("fsdp", tp=4, dp=2, **LLAMA | {"on": "8xh100-80gb"}), "axolotl"))
    assert tensor["tensor_parallel_size"] == 4 and tensor["fsdp_config"]["offload_params"] is False
    report = check(tensor, gpus="8xh100-80gb")
    assert report.batch.global_batch == 8 and not report.errors


def test_a_frontier_grid_trains_its_own_model_or_a_tiny_one_with_heads_enough() -> None:
    grid = a_plan("zero1", dp=2, tp=8, pp=4, virtual_stages=2, **LLAMA | {"on": "8x8xh100-80gb"})
    module, given = program_of(grid, model="my-llama")
    assert module == "course_lib.training.three_d" and (given["dp"], given["tp"], given["pp"]) == (2, 8, 4)
    assert given["model"] == "my-llama" and "layers" not in given
    assert "one stage per pipeline rank instead of 2" in text_of(grid, "torchrun")
    _, tiny = program_of(grid)
    assert (tiny["heads"], tiny["kv_heads"], tiny["layers"]) == (8, 8, 8)


# (a plan, the target that cannot, the words for why, the targets that can)
REFUSED = [
    (
        a_plan("single", dp=1, pp=2),
        "axolotl",
        "Axolotl has no pipeline parallelism, and the plan has pp=2",
        "torchrun can.",
    ),
    (a_plan("ddp", cp=2, dp=1), "accelerate", "no context parallelism, and the plan has cp=2", "target torchrun can."),
    (
        a_plan("ddp", method="qlora", **LLAMA),
        "torchrun",
        "on one device and under FSDP2, not under ddp",
        "targets accelerate and axolotl can.",
    ),
    (
        a_plan("ddp"),
        "deepspeed",
        "speaks of ZeRO's stages 1 to 3, and the plan's strategy is 'ddp'",
        "torchrun and accelerate",
    ),
    (a_plan("zero1"), "fsdp", "This file is FSDP2, and the plan's strategy is 'zero1'", "deepspeed can."),
    (
        a_plan("fsdp", offload="optimizer"),
        "fsdp",
        "offloads parameters, gradients and optimizer together or not at all",
        "no target can run it.",
    ),
    (
        a_plan("ddp", dp=1, tp=2, cp=2, on="4xcpu"),
        "torchrun",
        "joins cp=2 with tp=2 (Megatron-LM can: --tensor-model-parallel-size 2 --context-parallel-size 2",
        "no target can run it.",
    ),
    (
        a_plan("ddp", tp=2, dp=2, **LLAMA | {"on": "4xh100-80gb"}),
        "axolotl",
        "shards the data ranks by FSDP2",
        "torchrun can.",
    ),
    (a_plan("single", dp=1, tp=2, method="lora", **LLAMA), "axolotl", "no LoRA under tensor parallelism", "no target"),
    (
        a_plan("ddp", dp=1, on="1xcpu"),
        "axolotl",
        "by its name on the hub or from a folder, and tiny has neither",
        "can.",
    ),
    (a_plan("ddp", dp=3, on="2x2xcpu"), "accelerate", "3 do not fill machines of 2", "no target can run it."),
    (
        a_plan("fsdp", dp=2, **LLAMA | {"on": "2x24GiB"}),
        "axolotl",
        "Axolotl would not run this plan as it stands: A GPU needs",
        "can.",
    ),
]


@pytest.mark.parametrize(("one", "target", "why", "can"), REFUSED)
def test_what_a_target_cannot_say_is_refused_with_what_can(one, target, why, can) -> None:
    with pytest.raises(ValueError) as refused:
        files(one, target)
    said = str(refused.value)
    assert why in said and can in said
    assert target not in targets_of(one) and said.startswith(why_not(one, target).rstrip("."))
    assert said.count(". ") <= 1 and "\n" not in said


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="target='axolotle' is no choice: did you mean 'axolotl'"):
        files(a_plan(), "axolotle")
    with pytest.raises(ValueError, match="is no plan: give one of"):
        files("llama", "axolotl")
    assert yaml.safe_load(text_of(a_plan("ddp"), "axolotl", base_model="mine/tiny"))["base_model"] == "mine/tiny"


def test_what_the_planner_plans_can_be_written() -> None:
    """Of everyday questions the best plan has a target, no target breaks on any, and no YAML has a mistake in it."""
    for model, on in {"llama-3.1-8b": "2x24GiB", "qwen2.5-7b": "8xa100-80gb", "llama-2-7b": "rtx4090"}.items():
        answer = plan(model, on, global_batch=32, seq_len=2048, axes=("dp", "tp", "pp"), keep=6)
        assert targets_of(answer.best)
        for one in answer.plans:
            for target in TARGETS:
                if why := why_not(one, target):
                    assert why.endswith(".") and len(why) < 500
                elif target == "axolotl":
                    assert not check(yaml.safe_load(text_of(one, target)), gpus=on).errors
                elif target == "deepspeed":
                    check_config(json.loads(text_of(one, target)), ranks=one.dp, free=2**50)
    assert str(machines("2x24GiB")) in text_of(replace(answer.best, machines=machines("2x24GiB")), "accelerate")
