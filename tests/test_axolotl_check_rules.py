"""Each rule of `course_tools.axolotl.check`: a YAML in which it must find its mistake, and a near miss in which it must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from axolotl_yaml import AUTO, FSDP, GOOD, LORA, NO_KERNELS, QLORA, ZERO3, changed, make_folder

from course_tools.axolotl.check import check

LESSONS = Path(__file__).parents[1] / "lessons" / "07_axolotl"
CARDS = "4x24GiB"


def data(path: str = "./alpaca.jsonl", kind: Any = "alpaca", **more: Any) -> dict:
    return {"datasets": [{"path": path, "type": kind, **more}]}


def fsdp(**more: Any) -> dict:
    return {"fsdp_config": FSDP["fsdp_config"] | more}


def zero(**more: Any) -> dict:
    return {"deepspeed": ZERO3 | more}


class Case(NamedTuple):
    key: str
    words: str
    bad: dict
    good: dict
    gpus: str = CARDS
    level: str = "error"


MIB_CARD = "4x1500MiB"
CASES = [
    # keys
    # types
    Case(
        "lr_scheduler_kwargs.min_lr",
        "nothing converts it",
        {"lr_scheduler_kwargs": {"min_lr": "1e-5"}},
        {"lr_scheduler_kwargs": {"min_lr": 1e-5}},
        level="warning",
    ),
    # numbers
    Case(
        "micro_batch_size", "no number of anything", {"micro_batch_size": 0}, {"micro_batch_size": 1}, level="warning"
    ),
    Case(
        "batch_size",
        "does not set the accumulation",
        {"batch_size": 32, "gradient_accumulation_steps": None},
        {},
        level="warning",
    ),
    Case("learning_rate", "text", {"learning_rate": "1e-4"}, {"learning_rate": 1e-4}, level="note"),
    Case("learning_rate", "far above", {"learning_rate": 2}, {"learning_rate": 0.05}, level="warning"),
    Case("warmup_steps", "never reached", {"warmup_steps": 8}, {"warmup_steps": 7}, level="warning"),
    # data
    Case("datasets[0].path", "does not exist", data("./nowhere.jsonl"), data("yahma/alpaca-cleaned")),
    Case("datasets[0].path", "is empty", data("./empty.jsonl"), {}),
    Case(
        "datasets[0].path",
        "line 2, is not JSON",
        data("./broken.jsonl", "completion"),
        data("./texts.jsonl", "completion"),
    ),
    Case(
        "datasets[0].type", "reads the field 'text'", data(kind="completion"), data(kind="completion", field="output")
    ),
    Case("datasets[0].type", "reads the field 'instruction'", data("./texts.jsonl"), {}),
    Case(
        "datasets[0].type",
        "reads the field 'messages'",
        data(kind="chat_template"),
        data("./chat.jsonl", "chat_template"),
    ),
    Case(
        "datasets[0].type",
        "each message needs 'role'",
        data("./sharegpt.jsonl", "chat_template"),
        data("./sharegpt.jsonl", "chat_template", message_property_mappings={"role": "from", "content": "value"}),
    ),
    Case(
        "datasets[0].type",
        "field 'question'",
        data(kind={"field_instruction": "question"}),
        data(kind={"field_instruction": "instruction"}),
    ),
    Case("datasets[0]", "no type", {"datasets": [{"path": "./alpaca.jsonl"}]}, {}),
    Case("val_set_size", "nothing is left", {"val_set_size": 100}, {"val_set_size": 99}),
    Case(
        "datasets",
        "less than one full step",
        {"gradient_accumulation_steps": 12},
        {"gradient_accumulation_steps": 11},
        level="warning",
    ),
    Case(
        "sequence_len",
        "longer than 1 tokens",
        {"sample_packing": True, "sequence_len": 1},
        {"sample_packing": True, "sequence_len": 4},
        level="warning",
    ),
    # adapters
    Case("lora_r", "there is no LoRA", {"lora_r": 8}, LORA, level="warning"),
    Case(
        "adapter",
        "nothing to train",
        LORA | {"lora_target_linear": None},
        LORA | {"lora_target_linear": None, "lora_target_modules": ["q_proj"]},
        level="warning",
    ),
    Case("adapter", "lora_alpha is missing", LORA | {"lora_alpha": None}, LORA, level="warning"),
    Case("adapter", "Triton", LORA, LORA | NO_KERNELS, gpus="2xcpu"),
    # sharding
    Case("fsdp_version", "plain DDP", {"fsdp_version": 2}, FSDP, level="warning"),
    Case("tensor_parallel_size", "do not divide 4 ranks", {"tensor_parallel_size": 3}, {"tensor_parallel_size": 2}),
    Case("tensor_parallel_size", "heads", {"tensor_parallel_size": 8}, {"tensor_parallel_size": 4}, gpus="8x24GiB"),
    Case("tensor_parallel_size", "no lora under", LORA | {"tensor_parallel_size": 2}, LORA, level="warning"),
    Case("deepspeed", "No such file", {"deepspeed": "zero4.json"}, {"deepspeed": "./zero3.json"}),
    Case("deepspeed", "line 2, column", {"deepspeed": "bad.json"}, {"deepspeed": "zero3.json"}),
    Case(
        "deepspeed",
        "micro_batch_size is 2",
        zero(train_micro_batch_size_per_gpu=4),
        zero(train_micro_batch_size_per_gpu=2),
    ),
    Case("deepspeed", "the YAML makes it 24", zero(train_batch_size=32), zero(train_batch_size=24)),
    Case(
        "deepspeed",
        "trains in bf16",
        zero(fp16={"enabled": True}, bf16={"enabled": False}),
        zero(bf16={"enabled": True}),
    ),
    Case("deepspeed", "stages 0, 1, 2 and 3", {"deepspeed": AUTO | {"zero_optimization": {"stage": 4}}}, zero()),
    Case(
        "deepspeed",
        "offload_param needs stage 3",
        {"deepspeed": AUTO | {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}},
        {"deepspeed": AUTO | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
    ),
    # cards
    Case("bf16", "compute capability 7.5", LORA | {"bf16": True}, LORA | {"bf16": False, "fp16": True}, gpus="2xt4"),
    Case("bf16", "cannot be unscaled", {}, LORA, gpus="2xt4"),
    Case(
        "attn_implementation",
        "needs compute capability 8.0",
        LORA | {"attn_implementation": "flash_attention_2"},
        LORA,
        gpus="2xt4",
    ),
    Case(
        "flash_attention",
        "needs compute capability 8.0",
        LORA | {"attn_implementation": None, "flash_attention": True},
        LORA | {"attn_implementation": None, "sdp_attention": True},
        gpus="2xv100-32gb",
    ),
    Case(
        "micro_batch_size",
        "too many",
        {"micro_batch_size": 4096, "gradient_accumulation_steps": 1, "pad_to_sequence_len": True},
        {"micro_batch_size": 16, "gradient_accumulation_steps": 1, "pad_to_sequence_len": True},
        gpus="1x2GiB",
    ),
    Case(
        "micro_batch_size",
        "At most a GPU needs",  # batches that are padded to their longest only: nobody knows how long that is
        {"micro_batch_size": 4096, "gradient_accumulation_steps": 1},
        {"micro_batch_size": 16, "gradient_accumulation_steps": 1},
        gpus="1x2GiB",
        level="note",
    ),
    Case(
        "micro_batch_size",
        "At most a GPU needs",  # a fused loss needs less than is counted
        {"micro_batch_size": 4096, "pad_to_sequence_len": True, "cut_cross_entropy": True},
        {"micro_batch_size": 16, "pad_to_sequence_len": True, "cut_cross_entropy": True},
        gpus="1x2GiB",
        level="note",
    ),
    Case(
        "deepspeed",
        "no from_pretrained reads",  # DeepSpeed reads the key without its prefix too
        {"deepspeed": AUTO | {"zero_optimization": {"stage": 3}}},
        {"deepspeed": AUTO | {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}}},
        level="warning",
    ),
    # saving
    Case(
        "save_strategy",
        "No checkpoint is ever written",
        {"save_strategy": "no", "saves_per_epoch": None},
        {"saves_per_epoch": 1},
        level="warning",
    ),
    Case(
        "save_strategy",
        "saves_per_epoch wins",
        {"save_strategy": "no"},
        {"save_strategy": "no", "num_epochs": 0.5},
        level="warning",
    ),
    Case(
        "save_strategy",
        "No checkpoint is ever written",
        {"save_strategy": "no", "saves_per_epoch": 1, "num_epochs": 1},
        {"saves_per_epoch": 1, "num_epochs": 1},
        level="warning",
    ),
    Case("saves_per_epoch", "switches nothing off", {"saves_per_epoch": 0}, {}, level="warning"),
    Case(
        "save_steps",
        "at the very end only",
        {"save_steps": 8, "saves_per_epoch": None},
        {"save_steps": 3, "saves_per_epoch": None},
        level="warning",
    ),
    Case(
        "save_strategy",
        "transformers refuses",
        {"save_strategy": "step", "saves_per_epoch": None},
        {"save_strategy": "epoch", "saves_per_epoch": None},
        level="warning",
    ),
    Case(
        "fsdp_config.state_dict_type",
        "never written",
        fsdp(state_dict_type="SHARDED_STATE_DICT") | {"save_strategy": "no", "saves_per_epoch": None},
        fsdp(state_dict_type="SHARDED_STATE_DICT"),
        level="warning",
    ),
    Case(
        "save_only_model",
        "under SHARDED",
        fsdp(state_dict_type="SHARDED_STATE_DICT") | {"save_only_model": True},
        FSDP | {"save_only_model": True},
        level="warning",
    ),
    Case(
        "deepspeed",
        "no from_pretrained reads",
        {"deepspeed": AUTO | {"zero_optimization": {"stage": 3}}},
        zero(),
        level="warning",
    ),
    # resuming and writing
    Case(
        "resume_from_checkpoint",
        "no folder",
        {"resume_from_checkpoint": "./out/checkpoint-9"},
        {"resume_from_checkpoint": "./tiny"},
    ),
    Case(
        "auto_resume_from_checkpoints",
        "no checkpoint to resume",
        {"auto_resume_from_checkpoints": True, "save_strategy": "no", "saves_per_epoch": None},
        {"auto_resume_from_checkpoints": True},
        level="warning",
    ),
    Case(
        "save_only_model",
        "starts Adam from nothing",
        {"save_only_model": True, "auto_resume_from_checkpoints": True},
        {"save_only_model": True},
        level="warning",
    ),
    Case(
        "output_dir",
        "Checkpoints of an earlier run",
        {"output_dir": "./used"},
        {"output_dir": "./used", "auto_resume_from_checkpoints": True},
        level="warning",
    ),
    Case("output_dir", "is a file", {"output_dir": "./alpaca.jsonl/out"}, {"output_dir": "./new/out"}),
    Case("output_dir", "every run writes to", {"output_dir": None}, {}, level="warning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("rules") / "run")
    (made / "used" / "checkpoint-4").mkdir(parents=True)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.key}-{case.words}".replace(" ", "_"))
def test_found_and_not_found(case: Case, folder: Path) -> None:
    found = check(changed(**case.bad), gpus=case.gpus, folder=folder, validate=False).findings
    hits = [one for one in found if one.key == case.key and case.words in one.sentence]
    assert hits, [str(one) for one in found]
    assert hits[0].level == case.level and hits[0].sentence.endswith(".") and "\n" not in str(hits[0])
    assert hits[0].fix
    missed = check(changed(**case.good), gpus=case.gpus, folder=folder, validate=False).findings
    assert not [str(one) for one in missed if one.key == case.key and case.words in one.sentence]
    assert not [str(one) for one in missed if one.level == "error"], "the near miss has a mistake of its own"


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, "2xcpu"),
        (FSDP, "2xcpu"),
        ({"deepspeed": "zero3.json", "bf16": False}, "2xcpu"),
        ({"tensor_parallel_size": 2}, "2xcpu"),
        (LORA | NO_KERNELS, "2xcpu"),
        (FSDP | LORA | NO_KERNELS, "2xcpu"),
        (QLORA | NO_KERNELS, "2xcpu"),
        (data("./texts.jsonl", "completion") | {"sample_packing": True, "pad_to_sequence_len": True}, "2xcpu"),
        (
            {"gradient_checkpointing": True, "attn_implementation": "flash_attention_2", "micro_batch_size": 1},
            "2x8xh100",
        ),
        ({"learning_rate": 2e-5, "save_steps": 3, "saves_per_epoch": None, "save_total_limit": 2}, None),
    ],
)
def test_good_files_of_every_method_have_nothing_to_find(changes: dict, gpus: str | None, folder: Path) -> None:
    report = check(changed(**changes), gpus=gpus, folder=folder, validate=False)
    assert not report.findings, [str(one) for one in report.findings]


@pytest.mark.skipif(not (LESSONS / "base.yml").is_file(), reason="the lesson's files are not there")
@pytest.mark.parametrize("name", sorted(path.stem for path in LESSONS.glob("*.yml")))
def test_the_lessons_own_files_have_no_errors(name: str, folder: Path, tmp_path: Path) -> None:
    values = yaml.safe_load((LESSONS / "base.yml").read_text(encoding="utf-8"))
    values |= yaml.safe_load((LESSONS / f"{name}.yml").read_text(encoding="utf-8")) or {}
    values = json.loads(json.dumps(values).replace("runs/axolotl/instructions.jsonl", str(folder / "alpaca.jsonl")))
    values |= {"base_model": str(folder / "tiny"), "tokenizer_config": str(folder / "tiny")}
    (tmp_path / "07_axolotl").symlink_to(LESSONS)
    report = check(values, gpus="2xcpu", folder=tmp_path, validate=False)
    assert not report.errors, [str(one) for one in report.errors]
    assert report.memory is not None and report.batch.steps_per_epoch


def test_a_line_beside_each_finding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("typo.yml").write_text(GOOD.replace("./out", "./alpaca.jsonl/out").replace("type: alpaca", "type: completion"))
    found = {one.key: one.line for one in check("typo.yml", validate=False).errors}
    assert found == {"output_dir": 18, "datasets[0].type": 5}
    beside = Path("deeper")
    beside.mkdir()
    (beside / "run.yml").write_text(GOOD.replace("./alpaca", "./other"))
    (beside / "other.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    (error,) = check(beside / "run.yml", validate=False).errors
    assert "beside the YAML" in error.fix
