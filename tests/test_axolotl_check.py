"""What a YAML amounts to: its batch, who holds what, its memory, its command; and files that are none or are odd."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from axolotl_yaml import AUTO, FSDP, GOOD, LORA, QLORA, changed, make_folder, write_rows
from refusals import assert_refused

from course_lib.memory import estimate, largest_micro_batch, shape_of
from course_tools.axolotl import command
from course_tools.axolotl.check import check as check_with_axolotl
from course_tools.axolotl.check import read_yaml
from course_tools.axolotl.check.document import Renamed, loaded

check = functools.partial(check_with_axolotl, validate=False)
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
TINY = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "kv_heads": 2, "intermediate": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("axolotl") / "run")


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_a_line_for_each_key_and_a_finding_for_a_key_twice() -> None:
    document = read_yaml("good.yml")
    assert (document.line("datasets", 0, "type"), document.line("datasets", 0, "missing")) == (5, 3)
    Path("twice.yml").write_text("a: 1e-4\nb:\n  c: 1.0e-4\n  c: 2\nd: word\n")
    document = read_yaml("twice.yml")
    assert document.twice == ("c", 4) and document.values["b"]["c"] == 2 and document.line("d") == 5
    assert document.texts_like_numbers == [("a",)]


def test_what_is_no_yaml_or_no_card_is_refused_with_its_place(folder: Path) -> None:
    (folder / "noise.yml").write_bytes(bytes(range(128, 256)))
    (folder / "large.yml").write_bytes(b"a: 1\n" * 2 * 2**20)
    (folder / "nothing.yml").touch()
    assert_refused(
        [
            (lambda: loaded("a: [1\nb: 2\n", "x"), ValueError, "line 2, column"),
            (lambda: loaded("- a\n- b\n", "x"), ValueError, "list"),
            (lambda: loaded("a: *nobody\n", "x"), ValueError, "nobody"),
            (lambda: read_yaml("large.yml"), ValueError, "10 MiB"),
            (lambda: read_yaml("nothing.yml"), ValueError, "empty"),
            (lambda: read_yaml("nowhere.yml"), ValueError, "nowhere.yml"),
            (lambda: read_yaml("noise.yml"), ValueError, "UTF-8"),
            (lambda: check("good.yml", gpus="4xh10"), ValueError, "h10"),
        ]
    )


def test_the_good_yaml_is_good_and_amounts_to_this() -> None:
    report = check("good.yml", gpus="4x24GiB")
    assert not report.findings
    batch = report.batch
    assert (batch.micro, batch.accumulate, batch.data_ranks, batch.global_batch) == (2, 3, 4, 24)
    assert batch.rows == 90 and batch.tokens == 24 * 128
    assert batch.steps_per_epoch == 4, "90 rows are 45 micro-batches, 12 on the fullest rank, 3 a step"
    assert batch.total_steps == 8
    commands = {gpus: check("good.yml", gpus=gpus).launch_command for gpus in ("t4", "4x24GiB", "2x8xh100")}
    assert commands["4x24GiB"] == "axolotl train good.yml --launcher torchrun -- --nproc_per_node=4"
    assert "--launcher python" in commands["t4"]
    assert "--nnodes=2 --nproc_per_node=8 --rdzv_endpoint=" in commands["2x8xh100"]


def test_who_holds_what() -> None:
    zero2 = {"deepspeed": AUTO | {"zero_optimization": {"stage": 2}}}
    rows = [
        ({}, "4x24GiB", (1, 1, 1), 4),
        (FSDP, "4x24GiB", (4, 4, 4), 4),
        (FSDP | {"dp_shard_size": 2, "dp_replicate_size": 2}, "4x24GiB", (2, 2, 2), 4),
        (zero2, "4x24GiB", (1, 4, 4), 4),
        ({"deepspeed": "zero3.json"}, "4x24GiB", (4, 4, 4), 4),
        ({"tensor_parallel_size": 2}, "4x24GiB", (4, 4, 4), 2),
        (FSDP | {"context_parallel_size": 2, "dp_shard_size": 2}, "4x24GiB", (4, 4, 4), 2),
    ]
    for changes, gpus, parts, ranks in rows:
        report = check(changed(**changes), gpus=gpus)
        assert not report.errors, (changes, report.errors)
        assert tuple(holder.parts for holder in report.holders) == parts, changes
        assert report.batch.data_ranks == ranks and report.batch.global_batch == 6 * ranks, changes
    for impossible in ({"tensor_parallel_size": 4}, FSDP | {"dp_shard_size": 3}):
        report = check(changed(**impossible), gpus="4x24GiB")
        assert not report.holders and report.memory is None and "1/" not in str(report), impossible


def test_memory_is_the_courses_estimate_of_that_run() -> None:
    common = {"micro_batch_size": 2, "seq_len": 128, "num_microbatches": 3, "step": "fused", "ranks": 4}
    common["eval_micro_batch_size"] = 2
    ddp, lora = {"precision": "bf16", "strategy": "ddp"}, {"precision": "bf16-mixed", "lora_rank": 8}
    fsdp = {"precision": "bf16", "strategy": "fsdp", "activation_checkpointing": "full", "loading": "card"}
    rows = [
        ({}, ddp),
        (FSDP | {"gradient_checkpointing": True}, fsdp),
        (LORA, lora | {"strategy": "ddp", "method": "lora"}),
        (QLORA, lora | {"strategy": "ddp", "method": "qlora"}),
        ({"optimizer": "adamw_torch"}, ddp | {"step": "foreach"}),
        ({"val_set_size": 0}, ddp | {"eval_micro_batch_size": 0}),
        (
            QLORA | {"lora_target_linear": None, "lora_target_modules": ["q_proj", "o_proj"]},
            lora | {"strategy": "ddp", "method": "qlora", "lora_targets": "attention"},
        ),
        ({"plugins": [CUT], "eval_batch_size": 7}, ddp | {"eval_micro_batch_size": 7, "loss": "fused"}),
        ({"plugins": [CUT], "cut_cross_entropy": False}, ddp),
        ({"eval_batch_size": 7, "cut_cross_entropy": True}, ddp | {"eval_micro_batch_size": 7, "loss": "fused"}),
        (
            LORA | {"lora_modules_to_save": ["embed_tokens", "lm_head"]},
            lora | {"strategy": "ddp", "method": "lora", "train_embeddings": True},
        ),
        ({"bf16": False, "attn_implementation": "eager"}, ddp | {"precision": "fp32", "attention": "eager"}),
    ]
    for changes, asked in rows:
        memory = check(changed(**changes), gpus="4x24GiB").memory
        assert memory == estimate(shape_of(TINY), **(common | asked)), changes


def test_a_batch_that_the_cards_cannot_hold_and_the_largest_that_they_can(folder: Path) -> None:
    big = {"base_model": "meta-llama/Llama-3.2-1B", "micro_batch_size": 16, "sequence_len": 2048}
    values = changed(**big, gradient_accumulation_steps=1, pad_to_sequence_len=True)
    report, shape = check(values, gpus="2x24GiB"), shape_of("llama-3.2-1b")
    extra = 10 * shape.vocab * shape.hidden  # tied; fp32 under sdpa: 2 more of weight, gradient and bucket, 4 of Adam
    room = 24 * 2**30 - extra
    asked = {"precision": "bf16", "strategy": "ddp", "ranks": 2, "seq_len": 2048, "num_microbatches": 1}
    assert report.fits is False and report.largest == largest_micro_batch(shape, room, **asked) > 0
    (error,) = report.errors
    assert error.key == "micro_batch_size" and f"micro_batch_size: {report.largest}" in error.fix
    assert check(values | {"micro_batch_size": report.largest}, gpus="2x24GiB").fits
    assert not check(values, gpus="2xb200").errors
    # a model whose widths nobody knows; the course's tiny model is nobody else's
    unknown = check(changed(base_model="org/tiny"))
    assert unknown.memory is None and unknown.memory_unknown and not unknown.errors


def test_evaluation_can_be_what_does_not_fit(folder: Path) -> None:
    values = changed(
        base_model="meta-llama/Llama-3.2-1B", pad_to_sequence_len=True, micro_batch_size=1, sequence_len=2048, **LORA
    )
    report = check(values | {"eval_batch_size": 64}, gpus="2x24GiB")
    assert report.fits is False and report.memory.peak_phase == "evaluation"
    (error,) = report.errors
    assert error.key == "eval_batch_size" and f"eval_batch_size: {report.largest}" in error.fix
    assert check(values | {"eval_batch_size": report.largest}, gpus="2x24GiB").fits
    assert not check(values | {"eval_batch_size": report.largest + 1}, gpus="2x24GiB").fits
    assert check(values | {"eval_batch_size": 64, "val_set_size": 0}, gpus="2x24GiB").fits


def test_a_node_s_own_memory_is_part_of_the_answer(folder: Path) -> None:
    big = changed(base_model="meta-llama/Llama-2-70b-hf", gradient_checkpointing=True, **QLORA | FSDP)
    parameters = shape_of("llama-2-70b").parameters
    whole = check(big | {"fsdp_config": FSDP["fsdp_config"] | {"cpu_ram_efficient_loading": False}}, gpus="2x24GiB")
    assert whole.memory.peak_phase == "loading" and whole.memory.peak > 34 * 2**30 and not whole.fits
    assert whole.host.loading == 2 * 2 * parameters
    sharded = check(big | {"fsdp_config": FSDP["fsdp_config"] | {"cpu_ram_efficient_loading": True}}, gpus="2x24GiB")
    assert sharded.memory.peak_phase != "loading" and sharded.memory.peak < 24 * 2**30
    assert f"{4 * parameters / 2**30:.2f} GiB" in str(whole)


def test_gradients_that_wait_whole_for_the_last_micro_batch_are_told_apart(folder: Path) -> None:
    big = {"base_model": "meta-llama/Llama-3.1-8B", "pad_to_sequence_len": True, "gradient_checkpointing": True}
    waits = changed(**big, val_set_size=0, **FSDP)
    (error,) = check(waits, gpus="8x24GiB").errors
    assert error.key == "gradient_accumulation_steps" and "sync_each_batch" in error.fix
    ((path, value),) = error.mend.items()
    sent = waits | {path[0]: {path[1]: {path[2]: value}}}
    assert check(sent, gpus="8x24GiB").fits and not check(waits | sent, gpus="8x24GiB").errors
    whole, shards = (check(one, gpus="8x24GiB").memory.peak for one in (waits, sent))
    assert whole - shards > 0.5 * 2 * shape_of("llama-3.1-8b").parameters


def test_what_is_not_counted_keeps_a_run_from_fitting(folder: Path) -> None:
    values = changed(base_model="Qwen/Qwen3-30B-A3B", pad_to_sequence_len=True, micro_batch_size=1, **LORA)
    report = check(values, gpus="2xb200")  # PEFT adapts the experts, too
    assert report.fits is None and report.caveats and not report.errors
    attention = {"lora_target_linear": None, "lora_target_modules": ["q_proj", "v_proj"]}
    assert check(values | attention, gpus="2xb200").fits is True


def test_rows_and_steps_of_packed_capped_and_mixed_data(folder: Path) -> None:
    batch = check(changed(sample_packing=True), gpus="2x24GiB").batch
    assert (batch.rows, batch.validation, batch.steps_per_epoch) == (90, 10, None) and batch.unknown
    write_rows(folder / "long.jsonl", [{"instruction": "a", "output": "b"}] * 1000)
    long, half = ({"path": f"./{name}.jsonl", "type": "alpaca"} for name in ("long", "alpaca"))
    batch = check(changed(datasets=[long], val_set_size=100, max_steps=7), gpus="2x24GiB").batch
    assert (batch.rows, batch.steps_per_epoch, batch.total_steps, batch.capped) == (900, 75, 7, True)
    assert check(changed(datasets=[long, half | {"weight": 0.5}], val_set_size=0)).batch.rows == 1050


def test_the_commands_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["good.yml", "--gpus", "4×24GiB", "--quick"]) == 0
    Path("wrong.yml").write_text(GOOD.replace("./alpaca.jsonl", "./nowhere.jsonl"))
    capsys.readouterr()
    assert command.main(["wrong.yml", "--json", "--quick"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(finding["key"], finding["line"]) for finding in findings] == [("datasets[0].path", 3)]
    for argv in (["nowhere.yml"], ["good.yml", "--gpus", "4xh10"], ["good.yml", "--gpu", "4"], []):
        code, result = command.main(argv), capsys.readouterr()
        assert (code, result.out, result.err.count("\n")) == (2, "", 1), (argv, result)


def test_fix_mends_what_is_certain_and_keeps_every_comment(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = GOOD.replace("0.0002", "2e-4 # text").replace("saves_per_epoch: 2", "save_only_model: true  # small")
    wrong = (
        "# mine\n" + wrong + "auto_resume_from_checkpoints: true\noptimizer: adamw_8bit # less\nfsdp_config:\n  {}\n"
    )
    wrong = wrong.replace("optimizer: adamw_torch_fused\n", "").format("state_dict_type: FULL_STATE_DICT  # whole")
    Path("mend.yml").write_text(wrong)
    command.main(["mend.yml", "--quick", "--fix", "mended.yml"])
    assert "mended.yml" in capsys.readouterr().out
    text = Path("mended.yml").read_text()
    changes = {
        "learning_rate: 2e-4": "learning_rate: 0.0002",
        "adamw_8bit": "adamw_torch_8bit",
        "model: true": "model: false",
    }
    for old, new in changes.items():
        wrong = wrong.replace(old, new)
    assert text.split() == wrong.split(), "nothing else is touched"
    before, after = ({one.key for one in check(name).findings} for name in ("mend.yml", "mended.yml"))
    assert before - after == {"learning_rate", "optimizer", "save_only_model"} and not after - before
    assert command.main(["mend.yml", "--quick", "--fix", "mended.yml"]) == 2, "it is there already"
    assert command.main(["mend.yml", "good.yml", "--quick", "--fix", "other.yml"]) == 2
    assert text == Path("mended.yml").read_text() and not Path("other.yml").exists()
    renamed = read_yaml("mend.yml").mended({("micro_batch_size",): Renamed("batch")})
    assert [line.split(":")[0] for line in renamed.splitlines()][9] == "batch"  # where the old name stood
    for lossy in ("learning_rate: 2e-4\na: 1\na: 3\n", "x: &a [1]\nlearning_rate: 2e-4\ny: *a\n"):
        Path("lossy.yml").write_text(GOOD.replace("learning_rate: 0.0002\n", "") + lossy)
        code = command.main(["lossy.yml", "--quick", "--fix", "lost.yml"])
        if "&a" in lossy:  # an anchor stays one
            assert code != 2 and "*a" in Path("lost.yml").read_text()
        else:  # which of the two was meant?
            assert code == 2 and not Path("lost.yml").exists()


def test_many_files_are_many_reports_and_the_worst_counts(capsys: pytest.CaptureFixture[str]) -> None:
    Path("worse.yml").write_text(GOOD.replace("./alpaca.jsonl", "./nowhere.jsonl"))
    assert command.main(["good.yml", "worse.yml", "--quick", "--json"]) == 1
    assert [bool(one["findings"]) for one in json.loads(capsys.readouterr().out)] == [False, True]
    assert command.main(["good.yml", "good.yml", "--quick"]) == 0
    capsys.readouterr()
    assert command.main(["absent.yml", "good.yml", "--quick"]) == 2
    printed = capsys.readouterr()
    assert "good.yml" in printed.out and "absent.yml" in printed.err


ODD = """\
datasets: 3
fsdp_config: [1]
deepspeed: {bf16: true, zero_optimization: []}
datasets: [[], null, 3, {path: [x]}]
num_epochs: .nan
micro_batch_size: 99999999999999999999
base_model: "a\\0b"
1: 2
a: &a [*a]
"""


def test_no_odd_yaml_raises(capsys: pytest.CaptureFixture[str]) -> None:
    datasets = "datasets:\n  - path: ./alpaca.jsonl\n    ds_type: json\n    type: alpaca\n"
    for text in [*ODD.splitlines(), "output_dir: " + "x" * 5000]:
        key = text.split(":")[0]
        kept = GOOD.replace(datasets, "") if key == "datasets" else GOOD
        lines = [line for line in kept.splitlines() if not line.startswith(f"{key}:")]
        Path("odd.yml").write_text("\n".join([*lines, text, ""]))
        assert command.main(["odd.yml", "--quick"]) in (0, 1), text
        assert not capsys.readouterr().err, text


def test_a_check_imports_no_torch() -> None:
    script = (
        "import sys; from course_tools.axolotl.command import main; code = main(['good.yml', '--quick']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
