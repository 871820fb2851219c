"""What a plan becomes: each file says what the plan says, its framework reads it, and what cannot be said is refused."""

from __future__ import annotations

import ast
import importlib.util
import json

import yaml
from plan_cases import LLAMA, a_plan
from refusals import assert_refused

from course_tools.axolotl.check import check
from course_tools.planning import plan
from course_tools.planning.files import files, targets_of, torchrun, why_not, write


def text_of(one_plan, target):
    (text,) = files(one_plan, target).values()
    return text


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
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_extend_env_parallelism_config

    options = vars(launch_command_parser().parse_args(["script.py"]))
    for strategy, kind in {"ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "fsdp": "FSDP"}.items():
        one_plan = a_plan(strategy, dp=16, activation_checkpointing="full", **LLAMA | {"on": "2x8xh100-80gb"})
        (path,) = write(one_plan, "accelerate", tmp_path / strategy)
        read = load_config_from_file(str(path))  # an unknown key is an error there
        assert (read.distributed_type.value, read.num_processes, read.num_machines) == (kind, 16, 2)
        assert read.mixed_precision == "bf16" and not read.use_cpu
        assert set(read.fsdp_config) | set(read.deepspeed_config) <= set(options)  # it reads past others in silence
    assert read.fsdp_config["fsdp_cpu_ram_efficient_loading"] is True
    assert read.fsdp_config["fsdp_version"] == 2 and read.fsdp_config["fsdp_activation_checkpointing"] is True
    assert read.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    copies = a_plan("fsdp", dp=16, copies=2, optimizer="adamw8bit", loss="fused", **LLAMA | {"on": "2x8xh100-80gb"})
    (path,) = write(copies, "accelerate", tmp_path)
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))
    assert arguments.use_fsdp and arguments.use_parallelism_config
    sizes = {f"PARALLELISM_CONFIG_DP_{name}_SIZE": size for name, size in (("REPLICATE", "2"), ("SHARD", "8"))}
    assert sizes.items() <= prepare_extend_env_parallelism_config(arguments, {}).items()
    for word in ("sync_each_batch=True", "adamw8bit by torchao", "fused loss"):  # what the script has to say itself
        assert word in path.read_text()


def test_axolotl_s_yaml_is_the_plan() -> None:
    choices = {"activation_checkpointing": "selective", "lora_rank": 32, "offload": "optimizer", **LLAMA}
    result = yaml.safe_load(text_of(a_plan("zero2", method="qlora", num_microbatches=8, **choices), "axolotl"))
    expected = {"micro_batch_size": 2, "gradient_accumulation_steps": 8, "sequence_len": 2048, "bf16": True}
    expected |= {"adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "gradient_checkpointing": True}
    assert expected.items() <= result.items()
    assert result["deepspeed"]["zero_optimization"]["stage"] == 2
    assert result["deepspeed"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    tensor = yaml.safe_load(text_of(a_plan("fsdp", tp=4, dp=2, **LLAMA | {"on": "8xh100-80gb"}), "axolotl"))
    assert tensor["tensor_parallel_size"] == 4 and "fsdp_config" not in tensor  # beside it transformers shards
    shards = yaml.safe_load(text_of(a_plan("fsdp", method="qlora", **LLAMA | {"on": "2xa100-80gb"}), "axolotl"))
    assert shards["fsdp_config"]["cpu_ram_efficient_loading"] is True  # else each card would take the whole model
    copies = a_plan("fsdp", dp=8, copies=2, optimizer="adamw8bit", loss="fused", **LLAMA | {"on": "8xh100-80gb"})
    result = yaml.safe_load(text_of(copies, "axolotl"))
    expected = {"dp_replicate_size": 2, "dp_shard_size": 4, "optimizer": "adamw_torch_8bit"}
    expected |= {"liger_fused_linear_cross_entropy": True, "plugins": ["axolotl.integrations.liger.LigerPlugin"]}
    expected |= {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    assert expected.items() <= result.items() and not check(result, gpus="8xh100-80gb").errors
    for optimizer, name in (("adamw8bit", "adamw_bnb_8bit"), ("paged_adamw8bit", "paged_adamw_8bit")):
        one = a_plan("ddp", method="lora", optimizer=optimizer, loss="chunked", **LLAMA)
        result = yaml.safe_load(text_of(one, "axolotl"))
        assert result["optimizer"] == name and result["chunked_cross_entropy"] is True
        assert "accelerator_config" not in result and not check(result, gpus="2xh100-80gb").errors
    report = check(tensor, gpus="8xh100-80gb")
    assert report.batch.global_batch == 8 and not report.errors


def test_a_script_is_built_of_what_the_plan_uses() -> None:
    """And of nothing else: what it imports it names, and what it names it imports."""
    four, mixed = LLAMA | {"on": "4xh100-80gb"}, {"precision": "bf16-mixed", "on": "2xh100-80gb"}
    rows = {
        "return model\n": a_plan("single", dp=1),
        "DistributedDataParallel(model)": a_plan("ddp", optimizer="paged_adamw8bit", method="qlora", **LLAMA),
        "from torchao.optim import AdamW8bit": a_plan("fsdp", optimizer="adamw8bit", **LLAMA),
        'init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))': a_plan(dp=4, copies=2, **four),
        'split(blocks, mesh["tp"])': a_plan(dp=2, tp=2, **four),
        "CPUOffloadPolicy(pin_memory": a_plan(offload="all", **LLAMA),
        'AutoConfig.from_pretrained("Qwen/Qwen3-0.6B")': a_plan(model="qwen3-0.6b", optimizer="sgd", **mixed),
    }
    importable = set().union(*torchrun.IMPORTS.values())
    for words, one in rows.items():
        text = text_of(one, "torchrun")
        assert words in text
        nodes = list(ast.walk(ast.parse(text)))
        imported = [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
        named = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert sorted(imported) == sorted(named & importable), words


def test_a_target_that_cannot_do_all_of_a_plan_says_so() -> None:
    four, nobody = LLAMA | {"on": "4xh100-80gb"}, ()
    lora = {"method": "lora", **LLAMA}
    sixteen = {"dp": 16, "on": "2x8xh100-80gb", "precision": "bf16-mixed"}
    rows = [
        (a_plan("single", dp=1, pp=2), "axolotl", "pp=2", nobody),
        (a_plan("ddp", dp=1, cp=2, **LLAMA), "axolotl", "cp=2", nobody),
        (a_plan("ddp"), "deepspeed", "'ddp'", ("accelerate", "torchrun")),
        (a_plan("zero3", offload="all"), "torchrun", "'zero3'", ("accelerate", "deepspeed")),
        (a_plan("fsdp", offload="optimizer"), "torchrun", "optimizer", nobody),
        (a_plan("fsdp", tp=2, dp=2, **four), "accelerate", "tp=2", ("torchrun", "axolotl")),
        (a_plan("single", dp=1, tp=2, **LLAMA), "torchrun", "tensor", ("axolotl",)),
        (a_plan("fsdp", model="llama-3.1-70b", **sixteen), "torchrun", "2,103 GiB", ("accelerate", "axolotl")),
        (a_plan("fsdp", model="gpt3-175b", **sixteen), "torchrun", "gpt3-175b", ("accelerate",)),
        (a_plan("zero2", optimizer="adamw8bit", **lora), "deepspeed", "adamw8bit", ("accelerate", "axolotl")),
        (a_plan("zero2", loss="chunked", **lora), "deepspeed", "chunked", ("accelerate", "axolotl")),
        (a_plan("fsdp", loss="fused", **lora), "torchrun", "fused", ("accelerate", "axolotl")),
        (a_plan("ddp", loss="half", **LLAMA), "axolotl", "half", ("accelerate",)),
        (a_plan("ddp", optimizer="muon", **LLAMA), "axolotl", "muon", ("accelerate",)),
        (a_plan("fsdp", tp=2, dp=2, loss="fused", **four), "axolotl", "Liger", nobody),
        (a_plan("fsdp", optimizer="paged_adamw8bit", **LLAMA), "accelerate", "DTensors", nobody),
        (a_plan("ddp", ep=2, **LLAMA), "accelerate", "ep=2", nobody),
        (a_plan("ddp", tp=2, dp=2, **four), "axolotl", "FSDP2", nobody),
        (a_plan("single", dp=1, tp=2, method="lora", **LLAMA), "axolotl", "LoRA", nobody),
        (a_plan("ddp", dp=1, on="1xcpu"), "axolotl", "tiny", ("accelerate", "torchrun")),
        (a_plan("ddp", dp=3, on="2x2xcpu"), "accelerate", "machines of 2", nobody),
        (a_plan("fsdp", **LLAMA | {"on": "2x24GiB"}), "axolotl", "GPU needs", ("accelerate", "torchrun")),
        (a_plan("ddp", compile=True, **LLAMA), "accelerate", "torch.compile", nobody),
        (
            a_plan("ddp", method="lora", **LLAMA | {"model": "mixtral-8x7b", "on": "2xh200"}),
            "torchrun",
            "mixture",
            ("accelerate", "axolotl"),
        ),
        (
            a_plan("ddp", method="lora", **LLAMA | {"model": "gemma-2-2b"}),
            "torchrun",
            "sdpa",
            ("accelerate", "axolotl"),
        ),
        (a_plan("ddp", method="qlora", **LLAMA | {"model": "gpt-oss-20b"}), "axolotl", "MXFP4", ("accelerate",)),
    ]
    for one_plan, target, fragment, others in rows:
        assert targets_of(one_plan) == others, (target, fragment)
        assert fragment in why_not(one_plan, target), (target, fragment)
    assert_refused((lambda row=row: files(row[0], row[1]), ValueError, row[2]) for row in rows)
    assert_refused(
        [
            (lambda: files(a_plan(), "axolotle"), ValueError, "'axolotl'"),
            (lambda: write(a_plan("ddp"), "accelerate", __file__), ValueError, "is a file"),
        ]
    )


def test_a_file_with_something_else_in_it_stays(tmp_path) -> None:
    (path,) = write(a_plan("ddp"), "accelerate", tmp_path)
    assert write(a_plan("ddp"), "accelerate", tmp_path) == [path]  # the same once more
    path.write_text("mine")
    assert_refused([(lambda: write(a_plan("ddp"), "accelerate", tmp_path), ValueError, "accelerate.yaml")])
    assert path.read_text() == "mine"


def test_a_mixture_s_adapters_and_attention_are_those_that_the_plan_counts() -> None:
    best = plan("qwen3-30b-a3b", "rtx4090", seq_len=2048, methods="qlora").best
    qlora = yaml.safe_load(text_of(best, "axolotl"))
    assert qlora["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"] and qlora["quantize_moe_experts"]
    seen = check(qlora, gpus="rtx4090", validate=False)
    assert best.memory.device == seen.memory.device and seen.fits
    for model, attention in (
        ("gemma-2-2b", "flash_attention_2"),
        ("gpt-oss-20b", "kernels-community/vllm-flash-attn3"),
    ):
        found = yaml.safe_load(text_of(a_plan("ddp", method="lora", **LLAMA | {"model": model}), "axolotl"))
        assert found["attn_implementation"] == attention and "lora_target_modules" not in found
    bf16 = a_plan("fsdp", method="qlora", **LLAMA | {"precision": "bf16"})
    assert "torch.bfloat16" in text_of(bf16, "accelerate") and "bnb_4bit_quant_storage" in text_of(bf16, "accelerate")


def test_what_the_planner_plans_can_be_written() -> None:
    """Of everyday questions the best plan has a target, no target breaks on any, and no YAML has a mistake in it."""
    for model, on in {"llama-3.1-8b": "2x24GiB", "qwen2.5-7b": "8xa100-80gb", "llama-2-7b": "rtx4090"}.items():
        answer = plan(model, on, global_batch=32, seq_len=2048, axes=("dp", "tp", "pp"), keep=6)
        assert targets_of(answer.best)
        for one_plan in answer.plans:
            for target in targets_of(one_plan):
                if target == "axolotl":
                    assert not check(yaml.safe_load(text_of(one_plan, target)), gpus=on).errors
                elif target == "deepspeed":
                    assert_sound(json.loads(text_of(one_plan, target)), ranks=one_plan.dp)
