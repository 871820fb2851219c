"""What a plan becomes: each file says what the plan says, its program takes it, and what cannot be said is refused."""

from __future__ import annotations

import importlib
import json
import shlex

import yaml
from plan_cases import HUGE, LLAMA, a_plan
from refusals import assert_refused

from course_lib.training.command_line import parse
from course_tools.axolotl.check import check
from course_tools.planning import plan
from course_tools.planning.files import deepspeed, files, program_of, targets_of, why_not, write
from course_tools.planning.files.programs import not_said
from course_tools.planning.small_run import run, shrunk

# Every program of the course, by a plan that it runs
PROGRAMS = {
    "single": a_plan("single", dp=1, on="1xcpu"),
    "accelerate_ddp": a_plan("ddp"),
    "zero": a_plan("zero3", activation_checkpointing="full", offload="all"),
    "fsdp": a_plan("fsdp", activation_checkpointing="selective", offload="all"),
    "tensor_parallel": a_plan("single", dp=1, tp=2, num_microbatches=1, sequence_parallel=True),
    "pipeline_parallel": a_plan("single", dp=1, pp=2, virtual_stages=3, num_microbatches=4),
    "context_parallel": a_plan("ddp", dp=1, cp=2, seq_len=4096, num_microbatches=1),
    "three_d": a_plan("zero1", tp=2, pp=8, dp=4, on="8x8xcpu", num_microbatches=8),
}


def text_of(one_plan, target):
    (text,) = files(one_plan, target).values()
    return text


def words_of(one_plan):
    """What torchrun's script gives to the launcher, the program, and what it gives to the program."""
    text = files(one_plan, "torchrun")["torchrun.sh"]
    line = text[text.index("exec ") :].replace("\\\n", " ").replace('"$@"', "")
    words = shlex.split(line)
    module = words.index("-m")
    return words[1:module], words[module + 1], words[module + 2 :]


def test_the_line_of_torchrun_is_one_that_the_program_takes() -> None:
    for name, one_plan in PROGRAMS.items():
        launcher, module, words = words_of(one_plan)
        meant, arguments = program_of(one_plan)
        assert module == meant and meant.startswith("course_lib.training.") and meant.endswith(f".{name}")
        taken = parse(importlib.import_module(module).train, words)
        if name == "zero":
            assert taken["config"] == "$(dirname $0)/ds_config.json"  # beside the script
            taken["config"] = json.loads(files(one_plan, "torchrun")["ds_config.json"])
        assert {key: taken[key] for key in arguments} == arguments, name
        ranks = one_plan.dp * one_plan.tp * one_plan.pp * one_plan.cp
        nodes = max(1, ranks // one_plan.machines.per_node)
        assert {f"--nnodes={nodes}", f"--nproc_per_node={ranks // nodes}"} <= set(launcher), name


def test_the_grid_and_the_batch_arrive() -> None:
    rows = {
        "accelerate_ddp": {"global_batch": 8, "seq_len": 32, "gradient_accumulation_steps": 2},
        "zero": {"seq_len": 32},
        "fsdp": {"global_batch": 8, "seq_len": 32, "gradient_accumulation_steps": 2, "bf16": False},
        "pipeline_parallel": {"schedule": "interleaved", "num_microbatches": 4, "virtual_stages": 3, "layers": 6},
        "three_d": {"dp": 4, "pp": 8, "tp": 2, "shard_data": True, "global_batch": 64, "layers": 8},
        "context_parallel": {"seq_len": 512},  # the tiny model knows no longer ones
    }
    for name, expected in rows.items():
        assert expected.items() <= program_of(PROGRAMS[name])[1].items(), name
    # several machines meet at the first, whose address the caller gives
    launcher, _, words = words_of(a_plan("fsdp", dp=16, **LLAMA | {"on": "2x8xh100-80gb"}))
    assert "--rdzv_endpoint=$endpoint" in launcher and "--bf16" in words
    stages = a_plan("ddp", dp=1, pp=2, **LLAMA)
    assert "--model=meta-llama/Llama-3.1-8B" in words_of(stages)[2]


def test_what_fsdp_s_program_leaves_out_is_said() -> None:
    in_bf16, in_fp16 = (a_plan("fsdp", **LLAMA | {"precision": f"{kind}-mixed"}) for kind in ("bf16", "fp16"))
    for one_plan, left_out in (
        (PROGRAMS["fsdp"], ["keeps all activations", "offloads nothing"]),
        (in_bf16, []),
        (in_fp16, ["computes in fp32"]),
    ):
        assert not_said(one_plan, *program_of(one_plan)) == left_out


def test_zero_s_program_gets_deepspeed_s_json_and_its_own_adam() -> None:
    module, arguments = program_of(PROGRAMS["zero"])
    assert arguments["config"] == deepspeed.config(PROGRAMS["zero"])
    assert not_said(PROGRAMS["zero"], module, arguments) == ["keeps all activations"]
    on_gpus = a_plan("zero2", offload="optimizer", **LLAMA)
    wanted = {"zero_force_ds_cpu_optimizer": False}
    assert program_of(on_gpus)[1]["config"] == deepspeed.config(on_gpus) | wanted
    assert not wanted.keys() & deepspeed.config(on_gpus).keys()  # who brings DeepSpeed's own Adam keeps it


def assert_sound(config, ranks):
    """DeepSpeed knows each key of the ZeRO section, and the batch sizes agree."""
    if importlib.util.find_spec("deepspeed"):
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        read = DeepSpeedZeroConfig(**config["zero_optimization"])  # an unknown key is an error there
        assert read.stage == config["zero_optimization"]["stage"]
    micro_batch, micro_batches = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == micro_batch * micro_batches * ranks


def test_deepspeed_s_json_is_sound() -> None:
    for stage, offload in ((1, "none"), (2, "optimizer"), (3, "optimizer"), (3, "all")):
        one_plan = a_plan(f"zero{stage}", micro_batch_size=3, num_microbatches=4, offload=offload, **LLAMA)
        config = json.loads(text_of(one_plan, "deepspeed"))
        assert_sound(config, ranks=2)
        assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (24, 3)
        assert config["gradient_clipping"] == 0.0 and config["bf16"] == {"enabled": True}
        zero = config["zero_optimization"]
        offloaded = ("offload_optimizer" in zero, "offload_param" in zero)
        assert (zero["stage"], *offloaded) == (stage, offload != "none", offload == "all")


def test_accelerate_s_own_loader_takes_each_kind(tmp_path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    options = vars(launch_command_parser().parse_args(["script.py"]))
    for strategy, kind in {"ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "fsdp": "FSDP"}.items():
        one_plan = a_plan(strategy, dp=16, activation_checkpointing="full", **LLAMA | {"on": "2x8xh100-80gb"})
        (path,) = write(one_plan, "accelerate", tmp_path)
        read = load_config_from_file(str(path))  # an unknown key is an error there
        assert (read.distributed_type.value, read.num_processes, read.num_machines) == (kind, 16, 2)
        assert read.mixed_precision == "bf16" and not read.use_cpu
        assert set(read.fsdp_config) | set(read.deepspeed_config) <= set(options)  # it reads past others in silence
    assert read.fsdp_config["fsdp_version"] == 2 and read.fsdp_config["fsdp_activation_checkpointing"] is True
    assert read.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"


def test_axolotl_s_yaml_is_the_plan() -> None:
    choices = {"activation_checkpointing": "selective", "lora_rank": 32, "offload": "optimizer", **LLAMA}
    result = yaml.safe_load(text_of(a_plan("zero2", method="qlora", num_microbatches=8, **choices), "axolotl"))
    expected = {"micro_batch_size": 2, "gradient_accumulation_steps": 8, "sequence_len": 2048, "bf16": True}
    expected |= {"adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "gradient_checkpointing": True}
    assert expected.items() <= result.items()
    assert result["deepspeed"]["zero_optimization"]["stage"] == 2
    assert result["deepspeed"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    tensor = yaml.safe_load(text_of(a_plan("fsdp", tp=4, dp=2, **LLAMA | {"on": "8xh100-80gb"}), "axolotl"))
    assert tensor["tensor_parallel_size"] == 4 and tensor["fsdp_config"]["offload_params"] is False
    report = check(tensor, gpus="8xh100-80gb")
    assert report.batch.global_batch == 8 and not report.errors


def test_a_program_or_target_that_cannot_do_all_of_a_plan_says_so() -> None:
    assert "FSDP2 instead of ZeRO-1" in text_of(PROGRAMS["three_d"], "torchrun")
    four, nobody = LLAMA | {"on": "4xh100-80gb"}, ()
    rows = [
        (a_plan("single", dp=1, pp=2), "axolotl", "pp=2", ("torchrun",)),
        (a_plan("ddp", method="qlora", **LLAMA), "torchrun", "every weight", ("accelerate", "axolotl")),
        (a_plan("fsdp", method="lora", **LLAMA), "torchrun", "every weight", ("accelerate", "fsdp", "axolotl")),
        (a_plan("ddp"), "deepspeed", "'ddp'", ("torchrun", "accelerate")),
        (a_plan("fsdp", offload="optimizer"), "fsdp", "optimizer", nobody),
        (a_plan("ddp", tp=2, dp=2, **four), "axolotl", "FSDP2", ("torchrun",)),
        (a_plan("single", dp=1, tp=2, method="lora", **LLAMA), "axolotl", "LoRA", nobody),
        (a_plan("ddp", dp=1, on="1xcpu"), "axolotl", "tiny", ("torchrun", "accelerate")),
        (a_plan("ddp", dp=3, on="2x2xcpu"), "accelerate", "machines of 2", nobody),
        (a_plan("fsdp", **LLAMA | {"on": "2x24GiB"}), "axolotl", "GPU needs", ("torchrun", "accelerate", "fsdp")),
    ]
    for one_plan, target, fragment, others in rows:
        assert targets_of(one_plan) == others, (target, fragment)
        assert fragment in why_not(one_plan, target), (target, fragment)
    assert_refused((lambda row=row: files(row[0], row[1]), ValueError, row[2]) for row in rows)
    assert_refused(
        [
            (lambda: files(a_plan(), "axolotle"), ValueError, "'axolotl'"),
            (lambda: write(a_plan("ddp"), "torchrun", __file__), ValueError, "is a file"),
            (lambda: run(a_plan(), ranks=9), ValueError, "ranks=9"),
            (lambda: run(a_plan("single", dp=1, tp=2, method="lora", **LLAMA)), ValueError, "every weight"),
        ]
    )


def test_what_the_planner_plans_can_be_written_and_run_small() -> None:
    """Of everyday questions the best plan has a target, no target breaks on any, and no YAML has a mistake in it."""
    for model, on in {"llama-3.1-8b": "2x24GiB", "qwen2.5-7b": "8xa100-80gb", "llama-2-7b": "rtx4090"}.items():
        answer = plan(model, on, global_batch=32, seq_len=2048, axes=("dp", "tp", "pp"), keep=6)
        assert targets_of(answer.best)
        for one_plan in answer.plans:
            if one_plan.method == "full":
                assert program_of(shrunk(one_plan))
            for target in targets_of(one_plan):
                if target == "axolotl":
                    assert not check(yaml.safe_load(text_of(one_plan, target)), gpus=on).errors
                elif target == "deepspeed":
                    assert_sound(json.loads(text_of(one_plan, target)), ranks=one_plan.dp)
    small = shrunk(HUGE)
    assert (small.dp, small.tp, small.pp, small.virtual_stages, small.machines.cpu) == (2, 2, 2, 1, True)
    assert (small.strategy, small.activation_checkpointing, small.sequence_parallel) == ("zero1", "selective", True)
    for one_plan in (HUGE, *PROGRAMS.values()):
        for ranks in (1, 3, 8):
            assert shrunk(one_plan, ranks).gpus <= ranks and program_of(shrunk(one_plan, ranks)), (one_plan, ranks)
