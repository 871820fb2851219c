"""What a YAML amounts to: read with lines, held against the schema, its batch, its holders, its memory, its command."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from axolotl_yaml import AUTO, FSDP, GOOD, LORA, NUM_ROWS, QLORA, changed, make_folder, write_rows

from course_lib.memory import estimate, largest_micro_batch, shape_of
from course_tools.axolotl.check import check as check_with_axolotl
from course_tools.axolotl.check import cluster, read_yaml
from course_tools.axolotl.check.packing import packed_rows
from course_tools.axolotl.check.yaml_lines import parse

check = functools.partial(check_with_axolotl, validate=False)
TINY = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "kv_heads": 2, "intermediate": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("axolotl") / "run")


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_a_line_for_each_key_and_a_finding_for_a_key_twice() -> None:
    document = read_yaml("good.yml")
    assert document.line("base_model") == 1
    assert document.line("datasets", 0, "type") == 5
    assert document.line("datasets", 0, "missing") == 3, "the line of what is around it"
    assert document.values["learning_rate"] == 0.0002
    twice = parse("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n")
    assert twice.duplicates == ((("b", "c"), 3), (("a",), 1))
    assert parse("a: 1e-4\nb: '1e-4'\nc: 1.0e-4\nd: word\n").plain_strings == {("a",)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2\n", "line 2, column"),
        ("a: b: c\n", "line 1, column 5"),
        ("a:\n\tb: 1\n", "line 2, column 1: a tab"),
        ("- a\n- b\n", "holds a list"),
        ("", "is empty"),
        ("a: 1\n--- \nb: 2\n", "line 2"),
        ("a: \x07\n", "line 1, column 4"),
        ("a: *nobody\n", "nobody"),
    ],
)
def test_what_is_no_yaml_is_one_sentence_with_a_place(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(folder: Path) -> None:
    (folder / "noise.yml").write_bytes(bytes(range(128, 256)))
    for name, words in (("nowhere.yml", "No such file"), ("noise.yml", "UTF-8"), (".", "is a folder")):
        with pytest.raises(ValueError, match=words):
            read_yaml(name)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "memory", "capability"),
    [
        ("4x24GiB", 1, 4, 24 * 2**30, None),
        ("4×24GiB", 1, 4, 24 * 2**30, None),
        ("8xa100-80gb", 1, 8, 80 * 2**30, (8, 0)),
        ("2x8xh100", 2, 8, 80 * 2**30, (9, 0)),
        ("T4", 1, 1, 15 * 2**30, (7, 5)),
        ("2 x RTX4090", 1, 2, 24 * 2**30, (8, 9)),
    ],
)
def test_cards(text: str, nodes: int, per_node: int, memory: int, capability: tuple[int, int] | None) -> None:
    found = cluster(text)
    assert (found.nodes, found.per_node, found.ranks, found.capability) == (
        nodes,
        per_node,
        nodes * per_node,
        capability,
    )
    assert found.card is not None and found.card.memory == memory


def test_cards_that_do_not_exist() -> None:
    assert cluster("2xcpu").cpu
    for text, words in (
        ("4xh10", "nearest"),
        ("0xt4", "no number"),
        ("2xa100", "a100-40gb or a100-80gb"),
        ("1x2x3xt4", "no number"),
        ("", "No card"),
        ("4", "No card"),
        (4, "give cards"),
    ):
        with pytest.raises(ValueError, match=words):
            cluster(text)  # type: ignore[arg-type]


def test_the_good_yaml_is_good_and_amounts_to_this() -> None:
    report = check("good.yml", gpus="4x24GiB")
    assert not report.findings, [str(one) for one in report.findings]
    assert report.launch_command == "axolotl train good.yml --launcher torchrun -- --nproc_per_node=4"
    batch = report.batch
    assert (batch.micro, batch.accumulate, batch.data_ranks, batch.global_batch) == (2, 3, 4, 24)
    assert batch.rows == 90 and batch.tokens == 24 * 128
    assert batch.steps_per_epoch == 4, "90 rows are 45 micro-batches, 12 on the fullest rank, 3 a step"
    assert batch.total_steps == 8
    text = str(report)
    for part in (report.launch_command, "= 24 sequences", "90 rows: 4 steps", "24GiB: 24.00 GiB, fits", "DDP"):
        assert part in text


def test_launch_commands() -> None:
    assert check("good.yml", gpus="t4").launch_command == "axolotl train good.yml --launcher python"
    several = check("good.yml", gpus="2x8xh100").launch_command
    assert "--nnodes=2 --nproc_per_node=8 --rdzv_endpoint=" in several


@pytest.mark.parametrize(
    ("changes", "gpus", "strategy", "parts", "ranks"),
    [
        ({}, "4x24GiB", "DDP", (1, 1, 1), 4),
        (FSDP, "4x24GiB", "FSDP2", (4, 4, 4), 4),
        (FSDP | {"dp_replicate_size": 2}, "4x24GiB", "FSDP2, 2 copies of 2 shards", (2, 2, 2), 4),
        ({"deepspeed": {"zero_optimization": {"stage": 1}, **AUTO}}, "4x24GiB", "DeepSpeed, ZeRO-1", (1, 1, 4), 4),
        ({"deepspeed": {"zero_optimization": {"stage": 2}, **AUTO}}, "4x24GiB", "DeepSpeed, ZeRO-2", (1, 4, 4), 4),
        ({"deepspeed": "zero3.json"}, "4x24GiB", "DeepSpeed, ZeRO-3", (4, 4, 4), 4),
        ({"tensor_parallel_size": 2}, "2x24GiB", "tensor parallelism", (2, 2, 2), 1),
        ({"tensor_parallel_size": 2}, "4x24GiB", "FSDP2 x tensor parallelism over 2", (4, 4, 4), 2),
        (FSDP | {"context_parallel_size": 2}, "4x24GiB", "FSDP2 x context parallelism over 2", (4, 4, 4), 2),
    ],
)
def test_who_holds_what(changes: dict, gpus: str, strategy: str, parts: tuple[int, ...], ranks: int) -> None:
    report = check(changed(**changes), gpus=gpus)
    assert not report.errors, [str(one) for one in report.errors]
    assert report.strategy == strategy
    assert tuple(one.parts for one in report.holders) == parts
    assert report.batch.data_ranks == ranks and report.batch.global_batch == 6 * ranks
    whole = check("good.yml", gpus="1x24GiB").memory
    assert whole is not None and report.memory is not None
    if parts == (4, 4, 4) and "DeepSpeed" not in strategy:  # fp32 shards where one device holds bf16
        assert report.holders[0].bytes == report.memory.weights < whole.weights * 2 / 3


def test_memory_is_the_courses_estimate_of_that_run() -> None:
    shape = shape_of(TINY)
    common = {"micro_batch_size": 2, "seq_len": 128, "num_microbatches": 3, "step": "fused"}
    for changes, asked in (
        ({}, {"precision": "bf16", "strategy": "ddp", "ranks": 4}),
        (
            FSDP | {"gradient_checkpointing": True},
            {"precision": "bf16-mixed", "strategy": "fsdp", "ranks": 4, "activation_checkpointing": "full"},
        ),
        (LORA, {"precision": "bf16-mixed", "strategy": "ddp", "ranks": 4, "method": "lora", "lora_rank": 8}),
        (QLORA, {"precision": "bf16-mixed", "strategy": "ddp", "ranks": 4, "method": "qlora", "lora_rank": 8}),
        ({"optimizer": "adamw_torch"}, {"precision": "bf16", "strategy": "ddp", "ranks": 4, "step": "foreach"}),
        (
            {"bf16": False, "attn_implementation": "eager"},
            {"precision": "fp32", "strategy": "ddp", "ranks": 4, "attention": "eager"},
        ),
    ):
        report = check(changed(**changes), gpus="4x24GiB")
        assert report.memory == estimate(shape, **(common | asked)), changes


def test_a_batch_that_the_cards_cannot_hold_and_the_largest_that_they_can() -> None:
    values = changed(
        base_model="meta-llama/Llama-3.2-1B",
        micro_batch_size=16,
        sequence_len=2048,
        gradient_accumulation_steps=1,
        pad_to_sequence_len=True,
    )
    report = check(values, gpus="2x24GiB")
    shape = shape_of("llama-3.2-1b")
    extra = 10 * shape.vocab * shape.hidden  # tied; fp32 under sdpa: 2 more of weight, gradient and bucket, 4 of Adam
    largest = largest_micro_batch(
        shape, 24 * 2**30 - extra, precision="bf16", strategy="ddp", ranks=2, seq_len=2048, num_microbatches=1
    )
    assert report.fits is False and report.largest == largest > 0
    (error,) = report.errors
    assert error.key == "micro_batch_size" and f"micro_batch_size: {largest}" in error.fix
    assert check(values | {"micro_batch_size": largest}, gpus="2x24GiB").fits
    assert not check(values, gpus="2xb200").errors
    assert "embedding and head in fp32" in report.caveats[0] and "embedding and head in fp32" in str(report)
    flash = check(values | {"attn_implementation": "flash_attention_2"}, gpus="2x24GiB")
    assert not any(caveat.startswith("Axolotl keeps") for caveat in flash.caveats)
    nothing = check(values | {"base_model": "meta-llama/Llama-3.1-70B"}, gpus="2x24GiB")
    assert "not even a micro-batch of 1" in nothing.errors[0].sentence


def test_a_model_whose_widths_nobody_knows_is_said_so(folder: Path) -> None:
    unknown = check(changed(base_model="someone/some-model"))
    assert unknown.memory is None and "presets" in unknown.memory_unknown and not unknown.errors
    assert [one.bytes for one in unknown.holders] == [None] * 3
    (folder / "odd").mkdir(exist_ok=True)
    (folder / "odd" / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 8}))
    assert "No model can be read" in check(changed(base_model="./odd")).memory_unknown
    assert check(changed(base_model="org/tiny")).memory is None, "the course's tiny model is nobody else's"


def test_packing_counts_rows_and_tokens(folder: Path) -> None:
    data = [{"path": "./texts.jsonl", "type": "completion"}]
    report = check(changed(datasets=data, sample_packing=True, sequence_len=16, val_set_size=0), gpus="2x24GiB")
    assert report.batch.tokens == 2 * 3 * 2 * 16
    assert report.batch.packed == NUM_ROWS / 2, "7 words and an end are 8 tokens: two in 16"
    assert report.batch.steps_per_epoch == 4, "25 micro-batches of 2, 12 a rank, 3 a step"
    assert "about 50 packed rows" in str(report)
    hub = check(changed(datasets=data, sample_packing=True, base_model="Qwen/Qwen3-0.6B"))
    assert hub.batch.steps_per_epoch is None and "tokenizer" in hub.batch.unknown
    assert packed_rows([3, 3, 3, 3], 6) == 2 and packed_rows([4, 4, 4], 6) == 3 and packed_rows([1] * 10, 6, 2) == 5
    assert packed_rows([3, 9, 1, 9, 2, 5, 2], 10, 2) == 5, "a row in the middle is full by number"


def test_steps_of_a_longer_run_and_of_max_steps(folder: Path) -> None:
    write_rows(folder / "long.jsonl", [{"instruction": "a", "output": "b"}] * 1000)
    data = [{"path": "./long.jsonl", "type": "alpaca"}]
    report = check(changed(datasets=data, val_set_size=100, max_steps=7), gpus="2x24GiB")
    assert report.batch.rows == 900 and report.batch.steps_per_epoch == 75
    assert report.batch.total_steps == 7 and report.batch.capped
    ignored = check(changed(batch_size=32, gradient_accumulation_steps=None), gpus="2x24GiB")
    assert ignored.batch.global_batch == 2 * 1 * 2, "Axolotl's default of 1 accumulated batch wins over batch_size"
    two = check(changed(datasets=[*data, {"path": "./alpaca.jsonl", "type": "alpaca", "weight": 0.5}], val_set_size=0))
    assert two.batch.rows == 1050


def test_json_has_everything_in_bytes() -> None:
    report = json.loads(json.dumps(check("good.yml").as_dict()))
    assert report["memory"]["weights"] == report["holders"][0]["bytes"]
    assert report["batch"]["global_batch"] == 24 and report["gpus"] == "4 x 24GiB" and report["findings"] == []
    assert GOOD.count("\n") == 18, "the lines that these tests name"
