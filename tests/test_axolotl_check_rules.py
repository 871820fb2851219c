"""Each rule of `beyond check`: a YAML in which it finds its mistake, and a near miss in which it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from axolotl_yaml import AUTO, FSDP, GOOD, LORA, NO_KERNELS, QLORA, WIDTHS, ZERO3, changed, make_folder

from course_tools.axolotl.check import check
from course_tools.axolotl.check.mistakes import BITSANDBYTES

LESSONS = Path(__file__).parents[1] / "lessons" / "07_axolotl"


def data(path: str = "./alpaca.jsonl", kind: Any = "alpaca", **more: Any) -> dict:
    return {"datasets": [{"path": path, "type": kind, **more}]}


def fsdp(**more: Any) -> dict:
    return {"fsdp_config": FSDP["fsdp_config"] | more}


def zero(**more: Any) -> dict:
    return {"deepspeed": ZERO3 | more}


def plain_zero(**more: Any) -> dict:
    return {"deepspeed": AUTO | {"zero_optimization": more}}


def every(**more: Any) -> dict:
    """Save by something else than saves_per_epoch."""
    return {"saves_per_epoch": None} | more


class Row(NamedTuple):
    level: str
    key: str
    bad: dict
    near_miss: dict
    gpus: str = "4x24GiB"


CPU = {"device": "cpu"}
RESUME = {"auto_resume_from_checkpoints": True}
EXPERTS = {"expert_parallel_size": 2}
TENSOR, CONTEXT = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}
USED = {"output_dir": "./used"}
MODEL_ONLY = {"save_only_model": True}
ONE_BATCH = {"gradient_accumulation_steps": 1}
PADDED = {"pad_to_sequence_len": True}
PACKED = {"sample_packing": True}
SIX = zero() | PADDED | {"base_model": "./six"}  # of six heads
FUSED = PADDED | {"tiled_mlp": True}
WHOLE = fsdp() | PADDED | LORA | {"base_model": "meta-llama/Llama-3.1-70B", "val_set_size": 0}
MIXTURE = PADDED | LORA | {"base_model": "mistralai/Mixtral-8x7B-v0.1", "lora_target_linear": None}
MIXTURE |= {"lora_target_modules": ["q_proj"]}
SHARED = "./sharegpt.jsonl"
MAPPED = {"message_property_mappings": {"role": "from", "content": "value"}}
NO_TARGET = LORA | {"lora_target_linear": None}
NO_ATTENTION = LORA | {"attn_implementation": None}
NEW = {"special_tokens": {"additional_special_tokens": ["<x>"]}}
SAVED = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}
BEST = every(load_best_model_at_end=True)
SHARDED = fsdp(state_dict_type="SHARDED_STATE_DICT")
BATCH = [
    Row("warning", "micro_batch_size", {"micro_batch_size": 0}, {}),
    Row("warning", "batch_size", {"batch_size": 32, "gradient_accumulation_steps": None}, {}),
    Row("note", "learning_rate", {"learning_rate": "1e-4"}, {"learning_rate": 1e-4}),
    Row("warning", "learning_rate", {"learning_rate": 2}, {"learning_rate": 0.05}),
    Row("warning", "num_epochs", {"num_epochs": 0}, {"num_epochs": 0, "max_steps": 3}),
    Row("warning", "max_steps", {"max_steps": 0}, {"max_steps": 1}),
    Row("warning", "warmup_steps", {"warmup_steps": 8}, {"warmup_steps": 7}),
]
DATA = [
    Row("error", "base_model", {"base_model": "./absent"}, {"base_model": "someone/absent"}),
    Row("error", "datasets[0].path", data("./nowhere.jsonl"), data("yahma/alpaca-cleaned")),
    Row("error", "datasets[0].path", data("./empty.jsonl"), {}),
    Row("error", "datasets[0].path", data("./broken.jsonl", "completion"), data("./texts.jsonl", "completion")),
    Row("error", "datasets[0].type", data(kind="completion"), data(kind="completion", field="output")),
    Row("error", "datasets[0].type", data(kind="chat_template"), data("./chat.jsonl", "chat_template")),
    Row("error", "datasets[0].type", data(SHARED, "chat_template"), data(SHARED, "chat_template", **MAPPED)),
    Row("error", "datasets[0].type", data(kind={"field_instruction": "x"}), data(kind={"field_instruction": "input"})),
    Row("error", "datasets[0]", {"datasets": [{"path": "./alpaca.jsonl"}]}, {}),
    Row("error", "val_set_size", {"val_set_size": 100}, {"val_set_size": 99}),
    Row("warning", "datasets", {"gradient_accumulation_steps": 12}, {"gradient_accumulation_steps": 11}),
    Row("warning", "sequence_len", PACKED | {"sequence_len": 1}, PACKED | {"sequence_len": 4}),
    Row("warning", "val_set_size", PACKED | {"val_set_size": 0.01}, PACKED | {"val_set_size": 0.02}),
    Row(
        "warning",
        "val_set_size",
        PACKED | {"val_set_size": 0.01},
        PACKED | {"val_set_size": 0.01, "eval_batch_size": 1},
    ),
]
ADAPTERS = [
    Row("warning", "lora_r", {"lora_r": 8}, LORA),
    Row("warning", "adapter", NO_TARGET, NO_TARGET | {"lora_target_modules": ["q_proj"]}),
    Row("warning", "adapter", LORA | {"lora_alpha": None}, LORA),
    Row("warning", "load_in_4bit", LORA | {"load_in_4bit": True}, QLORA),
    Row("error", "adapter", LORA, LORA | NO_KERNELS, "2xcpu"),
    Row("warning", "tokens", LORA | {"tokens": ["<x>"]}, LORA | SAVED | {"tokens": ["<x>"]}),
    Row("warning", "special_tokens", LORA | NEW, LORA | SAVED | NEW),
    Row("warning", "special_tokens", LORA | NEW, LORA | {"special_tokens": {"pad_token": "<unk>"}}),
]
SHARDING = [
    Row("warning", "fsdp_version", {"fsdp_version": 2}, FSDP),
    Row("error", "tensor_parallel_size", TENSOR, {}, "3x24GiB"),
    Row("error", "tensor_parallel_size", {"tensor_parallel_size": 4}, {"tensor_parallel_size": 2}, "8x24GiB"),
    Row("error", "dp_shard_size", FSDP | {"dp_shard_size": 3}, FSDP | {"dp_shard_size": 8}, "8x24GiB"),
    Row("error", "dp_shard_size", FSDP | {"dp_shard_size": 16}, FSDP | {"dp_shard_size": 1}, "8x24GiB"),
    Row("error", "dp_shard_size", FSDP | {"dp_shard_size": 2}, FSDP | {"dp_shard_size": 2, "dp_replicate_size": 2}),
    Row("error", "dp_replicate_size", FSDP | {"dp_replicate_size": 4}, {"dp_replicate_size": 4}),
    Row("error", "dp_replicate_size", {"dp_replicate_size": 2}, {"dp_replicate_size": 1}),
    Row("error", "dp_replicate_size", TENSOR | {"dp_replicate_size": 2}, TENSOR | {"dp_replicate_size": 1}),
    Row("error", "context_parallel_size", FSDP | CONTEXT, FSDP | CONTEXT | {"dp_shard_size": 2}),
    Row("error", "context_parallel_size", TENSOR | CONTEXT, TENSOR),
    Row("error", "sequence_parallel_degree", FSDP | {"sequence_parallel_degree": 3}, FSDP),
    Row("error", "context_parallel_size", zero() | PADDED | {"context_parallel_size": 3}, zero(), "6x24GiB"),
    Row("warning", "context_parallel_size", zero() | CONTEXT, zero() | CONTEXT | PADDED),
    Row("error", "sequence_len", SIX | {"context_parallel_size": 3}, SIX | {"context_parallel_size": 2}, "6x24GiB"),
    Row("warning", "fsdp_config", FSDP | TENSOR, TENSOR),
    Row("warning", "optimizer", FSDP | {"optimizer": "paged_adamw_8bit"}, FSDP | {"optimizer": "adamw_torch_8bit"}),
    Row("warning", "optimizer", TENSOR | {"optimizer": "lion_32bit"}, {"optimizer": "lion_32bit"}, "2x24GiB"),
    Row("warning", "tensor_parallel_size", LORA | {"tensor_parallel_size": 2}, LORA),
    Row("error", "expert_parallel_size", {"expert_parallel_size": 2}, {"expert_parallel_size": 4}),
    Row("error", "expert_parallel_size", FSDP | {"expert_parallel_size": 3}, FSDP | {"expert_parallel_size": 4}),
    Row("error", "dp_shard_size", FSDP | EXPERTS | {"dp_shard_size": 4}, FSDP | EXPERTS | {"dp_shard_size": 2}),
    Row(
        "warning",
        "fsdp_config.transformer_layer_cls_to_wrap",
        fsdp(transformer_layer_cls_to_wrap="MistralDecoderLayer"),
        fsdp(transformer_layer_cls_to_wrap="LlamaDecoderLayer"),
    ),
    Row("warning", "fsdp_config", WHOLE, WHOLE | fsdp(cpu_ram_efficient_loading=True), "8xh100"),
    Row(
        "error",
        "expert_parallel_size",
        MIXTURE | {"expert_parallel_size": 3},
        MIXTURE | {"expert_parallel_size": 1},
        "3xh200",
    ),
    Row("error", "dp_shard_size", {"dp_shard_size": 4}, FSDP | {"dp_shard_size": 4}),
    Row(
        "warning",
        "load_in_8bit",
        zero() | LORA | {"load_in_8bit": True},
        plain_zero(stage=2) | LORA | {"load_in_8bit": True},
    ),
    Row("error", "deepspeed", {"deepspeed": "zero4.json"}, {"deepspeed": "./zero3.json"}),
    Row("error", "deepspeed", {"deepspeed": "bad.json"}, {"deepspeed": "zero3.json"}),
    Row("error", "deepspeed", zero(train_batch_size=32), zero(train_batch_size=24)),
    Row("error", "deepspeed", zero(fp16={"enabled": True}), zero(bf16={"enabled": True})),
    Row("error", "deepspeed", plain_zero(stage=2, offload_param=CPU), plain_zero(stage=2, offload_optimizer=CPU)),
    # the key that gathers what is saved, here without its prefix: DeepSpeed reads both
    Row("warning", "deepspeed", plain_zero(stage=3), plain_zero(stage=3, gather_16bit_weights_on_model_save=True)),
]
HARDWARE = [
    Row("error", "bf16", LORA | {"bf16": True}, LORA | {"bf16": False, "fp16": True}, "2xt4"),
    Row("error", "bf16", {}, LORA, "2xt4"),
    Row("error", "attn_implementation", LORA | {"attn_implementation": "flash_attention_2"}, LORA, "2xt4"),
    Row("error", "flash_attention", NO_ATTENTION | {"flash_attention": True}, NO_ATTENTION, "2xv100-32gb"),
    Row("error", "micro_batch_size", {"micro_batch_size": 4096} | ONE_BATCH | PADDED, ONE_BATCH | PADDED, "1x2GiB"),
    # batches that are padded to their longest only: nobody knows how long that is
    Row("note", "micro_batch_size", {"micro_batch_size": 4096} | ONE_BATCH, {"micro_batch_size": 16}, "1x2GiB"),
    # a fused loss needs less than is counted
    Row("note", "micro_batch_size", {"micro_batch_size": 4096} | FUSED, {"micro_batch_size": 16} | FUSED, "1x2GiB"),
]
SAVING = [
    Row("warning", "save_strategy", every(save_strategy="no"), {"saves_per_epoch": 1}),
    Row("warning", "save_strategy", {"save_strategy": "no"}, {}),
    Row("warning", "saves_per_epoch", {"saves_per_epoch": 0}, {}),
    Row("warning", "save_steps", every(save_steps=8), every(save_steps=3)),
    Row("warning", "save_strategy", every(save_strategy="step"), every(save_strategy="epoch")),
    Row("warning", "fsdp_config.state_dict_type", SHARDED | every(save_strategy="no"), SHARDED),
    Row("warning", "save_only_model", SHARDED | MODEL_ONLY, FSDP | MODEL_ONLY),
    Row("error", "resume_from_checkpoint", {"resume_from_checkpoint": "./out/checkpoint-9"}, {}),
    Row("warning", "auto_resume_from_checkpoints", RESUME | every(save_strategy="no"), RESUME),
    Row("warning", "save_only_model", MODEL_ONLY | RESUME, MODEL_ONLY),
    Row("warning", "output_dir", USED, USED | RESUME),
    Row(
        "warning",
        "load_best_model_at_end",
        BEST | {"save_steps": 3, "eval_steps": 2},
        BEST | {"save_steps": 4, "eval_steps": 2},
    ),
    Row("warning", "load_best_model_at_end", BEST | {"val_set_size": 0, "save_steps": 4, "eval_steps": 2}, {}),
    Row("error", "output_dir", {"output_dir": "./alpaca.jsonl/out"}, {"output_dir": "./new/out"}),
    Row("warning", "output_dir", {"output_dir": None}, {}),
]
GROUPS = {"batch": BATCH, "data": DATA, "adapters": ADAPTERS, "sharding": SHARDING, "cards": HARDWARE, "saving": SAVING}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("rules") / "run")
    (made / "used" / "checkpoint-4").mkdir(parents=True)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}
    (made / "six").mkdir()
    (made / "six" / "config.json").write_text(json.dumps(WIDTHS | heads), encoding="utf-8")
    return made


@pytest.mark.parametrize("group", GROUPS)
def test_a_mistake_is_found_and_its_near_miss_is_not(group: str, folder: Path) -> None:
    for row in GROUPS[group]:
        findings = check(changed(**row.bad), gpus=row.gpus, folder=folder, validate=False).findings
        hits = [finding for finding in findings if finding.key == row.key]
        assert [hit.level for hit in hits] == [row.level], (row, hits)
        assert hits[0].fix and "\n" not in str(hits[0]), (row, hits)
        missed = check(changed(**row.near_miss), gpus=row.gpus, folder=folder, validate=False).findings
        assert not [finding for finding in missed if finding.key == row.key or finding.level == "error"], (row, missed)


def test_the_optimizers_that_cannot_step_shards_are_those_that_transformers_takes_from_bitsandbytes() -> None:
    from transformers import trainer_optimizer

    assert set(BITSANDBYTES) == {name.value for name in trainer_optimizer._BITSANDBYTES_OPTIMIZERS}


def test_good_files_of_every_method_have_nothing_to_find(folder: Path) -> None:
    flash = {"gradient_checkpointing": True, "attn_implementation": "flash_attention_2", "micro_batch_size": 1}
    rows = [
        ({}, "2xcpu"),
        (FSDP | LORA | NO_KERNELS, "2xcpu"),
        (QLORA | NO_KERNELS, "2xcpu"),
        (flash, "2x8xh100"),
    ]
    for changes, gpus in rows:
        findings = check(changed(**changes), gpus=gpus, folder=folder, validate=False).findings
        assert not findings, (changes, findings)


def test_the_lessons_own_files_have_no_errors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "07_axolotl").symlink_to(LESSONS)
    names = sorted({path.name for path in LESSONS.glob("*.yml")} - {"broken.yml"})
    assert "base.yml" in names
    for name in names:
        values = yaml.safe_load((LESSONS / "base.yml").read_text(encoding="utf-8"))
        values |= yaml.safe_load((LESSONS / name).read_text(encoding="utf-8")) or {}
        values["datasets"][0]["path"] = str(folder / "alpaca.jsonl")
        values |= {"base_model": str(folder / "tiny"), "tokenizer_config": str(folder / "tiny")}
        report = check(values, gpus="2xcpu", folder=tmp_path, validate=False)
        assert not report.errors, (name, report.errors)
        assert report.memory is not None and (report.batch.steps_per_epoch or report.batch.packing), name


def test_a_data_file_beside_the_yaml_is_not_where_axolotl_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    beside = Path("deeper")
    beside.mkdir()
    (beside / "run.yml").write_text(GOOD.replace("./alpaca", "./other"))
    (beside / "other.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    (error,) = check(beside / "run.yml", validate=False).errors
    assert error.line == 3 and "beside the YAML" in error.fix
