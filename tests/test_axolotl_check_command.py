"""The command, its speed's reason (no PyTorch), Axolotl's own validators behind --deep, and the stored schema."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from axolotl_yaml import GOOD, changed, make_folder

from course_tools.axolotl import command as axolotl_command
from course_tools.axolotl.check import schema
from course_tools.axolotl.check.checking import check
from course_tools.axolotl.check.findings import Finding

HEAVY = ("torch", "transformers", "axolotl", "datasets", "pydantic", "jsonschema")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("command") / "run")


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_exit_codes_and_one_sentence_for_what_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert axolotl_command.main(["good.yml", "--gpus", "4×24GiB"]) == 0
    assert "nothing found that is wrong" in capsys.readouterr().out
    Path("typo.yml").write_text(GOOD.replace("sequence_len", "sequence_length"))
    assert axolotl_command.main(["typo.yml", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(one["key"], one["line"], one["fix"]) for one in found] == [("sequence_length", 7, "write sequence_len")]
    Path("tab.yml").write_text("a:\n\tb: 1\n")
    for argv in (["nowhere.yml"], ["tab.yml"], ["good.yml", "--gpus", "4xh10"],
                 ["good.yml", "--gpu", "4"], ["good.yml", "more.yml"], []):  # fmt: skip
        assert axolotl_command.main(argv) == 2
        said = capsys.readouterr()
        assert not said.out and said.err.count("\n") == 1, said.err


@pytest.mark.parametrize(
    "text",
    ["datasets: 3", "fsdp_config: [1]", "deepspeed: {bf16: true, zero_optimization: []}", "deepspeed: {zero_optimization: {stage: true}}",
     "datasets: [[], null, 3, {path: [x]}]", "num_epochs: .nan", "save_steps: .inf", "micro_batch_size: 99999999999999999999",
     'base_model: "a\\0b"', "output_dir: " + "x" * 5000, "1: 2", "plugins: text", "a: &a [*a]", "val_set_size: -.inf", "sequence_len: 0",
     "tensor_parallel_size: 1000000", "lora_r: 1e400", "resume_from_checkpoint: [1]", "base_model: ./alpaca.jsonl", "base_model: ''"],
)  # fmt: skip
def test_no_yaml_raises(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    key = text.split(":")[0]
    kept = "".join(line + "\n" for line in GOOD.splitlines() if key == "datasets" or not line.startswith(key + ":"))
    if key == "datasets":
        kept = kept.replace("datasets:\n  - path: ./alpaca.jsonl\n    ds_type: json\n    type: alpaca\n", "")
    Path("odd.yml").write_text(kept + text + "\n")
    assert axolotl_command.main(["odd.yml"]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_check_imports_no_torch() -> None:
    script = (
        "import sys; from course_tools.axolotl.command import main; code = main(['good.yml']); "
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_another_axolotl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema.metadata, "version", lambda name: "0.99.0")
    (note,) = check("good.yml").findings
    assert note.level == "note" and "0.99.0" in note.sentence and schema.stored()["axolotl"] in note.sentence


@pytest.mark.skipif(schema.installed_version() is None, reason="Axolotl is not installed")
def test_axolotls_own_validators_see_what_no_rule_does() -> None:
    """In a process of their own, which pretends to have the cards: fp8 on an A100, and two options that exclude each other."""
    values = changed(fp8=True, max_memory={0: "20GiB"}, gpu_memory_limit="20GiB")
    assert not check(values, gpus="4xa100-80gb").errors
    errors = check(values, gpus="4xa100-80gb", deep=True).errors
    assert [one.key for one in errors] == ["gpu_memory_limit"], [str(one) for one in errors]
    assert "Axolotl refuses it: “max_memory and gpu_memory_limit are mutually exclusive" in errors[0].sentence


@pytest.fixture(scope="module")
def axolotl():
    return pytest.importorskip("axolotl.utils.config")


def test_the_stored_schema_is_that_of_the_installed_axolotl(axolotl: object) -> None:
    made, stored = schema.made(), schema.stored()
    if made["axolotl"] != stored["axolotl"]:
        pytest.skip(f"Axolotl {made['axolotl']} is installed, and {stored['axolotl']} is stored")
    assert json.loads(schema.text(made)) == stored
    assert schema.STORED.stat().st_size < 250_000


def test_axolotl_refuses_what_the_rules_say_that_it_refuses(axolotl: object) -> None:
    """Sentences of the rules against Axolotl itself: what `validate_config` says to each of these, in this process."""
    from course_tools.axolotl.check.deep import validate

    capabilities = {"bf16": True, "fp8": False, "tf32": True, "n_gpu": 4, "n_node": 1, "compute_capability": "sm_80"}
    fsdp = {"fsdp_config": {"reshard_after_forward": True}}
    refused = {
        "fsdp list": {"fsdp": ["full_shard"]}, "FSDP1": fsdp | {"fsdp_version": 1}, "both": fsdp | {"deepspeed": "zero3.json"},
        "4 bits": {"load_in_4bit": True}, "1e3": {"max_steps": "1e3"}, "false": {"save_strategy": False},
        "saving": {"save_strategy": "epoch", "save_steps": 2, "saves_per_epoch": None}, "batch": {"batch_size": 8},
        "8 bit": fsdp | {"optimizer": "adamw_bnb_8bit"}, "attention": {"attn_implementation": "flash"},
        "warm-up": {"warmup_steps": 1, "warmup_ratio": 0.1}, "empty": {"datasets": []},
        "eval": {"val_set_size": 0, "eval_strategy": "epoch"}, "sharding": fsdp | {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}},
    }  # fmt: skip
    for name, changes in refused.items():
        values = changed(**changes)
        assert check(values).errors, name
        assert validate(yaml.safe_load(yaml.safe_dump(values)), capabilities)["errors"], name
    passed = {
        "typo": {"gradiant_accumulation_steps": 4}, "nested": fsdp | {"fsdp_config": {"reshard_after_foward": True}},
        "optimizer": {"optimizer": "adamw_torh"}, "nothing": {"micro_batch_size": 0}, "deep text": {"lr_scheduler_kwargs": {"min_lr": "1e-5"}},
        "ignored": {"batch_size": 32, "gradient_accumulation_steps": None},
    }  # fmt: skip
    for name, changes in passed.items():
        values = changed(**changes)
        assert check(values).errors, name
        assert not validate(yaml.safe_load(yaml.safe_dump(values)), capabilities)["errors"], (
            f"{name}: Axolotl sees it itself now"
        )


def test_a_finding_reads_as_a_line() -> None:
    text = str(Finding("error", "a.b", 3, "It is wrong.", "write c"))
    assert text == "error: line 3, a.b: It is wrong. Fix: write c"
