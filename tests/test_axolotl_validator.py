"""Axolotl's own validator in a process of its own: what it refuses and reads past, and when the process ends."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from axolotl_yaml import FSDP, LORA, QLORA, changed, make_folder

from course_tools.axolotl.check import check, validator
from course_tools.axolotl.check.settings import DEFAULTS

ROOT = Path(__file__).parents[1]
here = pytest.mark.skipif(importlib.util.find_spec("axolotl") is None, reason="Axolotl is not installed")


def fsdp(**more: object) -> dict:
    return {"fsdp_config": FSDP["fsdp_config"] | more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("validator") / "run")


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


# (what is changed, the key that is named, what the fix says)
REFUSED = [
    ({"base_model": None}, "base_model", "add base_model"),
    ({"max_steps": "1e3"}, "max_steps", "write 1000"),
    ({"save_strategy": False, "saves_per_epoch": None}, "save_strategy", '"no"'),
    ({"wandb_name": 12}, "wandb_name", '"12"'),
    ({"chat_template": "chatlm"}, "chat_template", "write chatml"),
    ({"batch_size": 8}, "gradient_accumulation_steps", ""),
    (LORA | {"adapter": "qlora"}, "load_in_4bit", ""),
    (fsdp(sharding_strategy="FULL_SHARD"), "fsdp_config", ""),
    (FSDP | {"deepspeed": "zero3.json"}, "deepspeed", ""),
    (FSDP | {"optimizer": "adamw_bnb_8bit"}, "", ""),
]
READ_PAST = [
    ({"gradiant_accumulation_steps": 4}, "gradiant_accumulation_steps", "gradient_accumulation_steps"),
    ({"datasets": [{"path": "./alpaca.jsonl", "type": "alpaca", "tpye": 1}]}, "datasets[0].tpye", "type"),
    (fsdp(reshard_after_foward=True), "fsdp_config.reshard_after_foward", "reshard_after_forward"),
    (FSDP | {"reshard_after_forward": True}, "reshard_after_forward", "into fsdp_config"),
    ({"liger_rope": True}, "liger_rope", "plugins"),
]
ACCEPTED = [
    {},
    {"liger_rope": True, "plugins": ["axolotl.integrations.liger.LigerPlugin"]},
    {"model_type": "LlamaForCausalLM", "device_map": "auto"},  # an alias, and a key that takes anything
    {"max_steps": "1000", "micro_batch_size": 2.0},
    QLORA,
    FSDP | {"optimizer": "adamw_torch_8bit"},
]


@here
def test_what_axolotl_refuses_or_reads_past_is_an_error_and_what_it_takes_is_none() -> None:
    for rows, refused in ((REFUSED, True), (READ_PAST, False)):
        for changes, key, fix in rows:
            errors = [e for e in check(changed(**changes)).errors if ("refuses it" in e.sentence) is refused]
            assert [error.key for error in errors] == [key], (changes, errors)
            assert fix in errors[0].fix and "\n" not in str(errors[0]), (changes, errors)
    for changes in ACCEPTED:
        errors = check(changed(**changes)).errors
        assert not errors, (changes, errors)


@here
def test_names_and_plugins_that_do_not_exist() -> None:
    values = changed(optimizer="adamw_torh", plugins=["nobody.There"], herkey=1) | {"nothing": None}
    findings = {finding.key: finding for finding in check(values).findings}
    assert findings["optimizer"].level == "warning" and "adamw_torch" in findings["optimizer"].fix
    assert {findings[key].level for key in ("plugins", "herkey", "nothing")} == {"note"}
    assert "nobody" in findings["plugins"].sentence


@here
def test_the_cards_are_pretended() -> None:
    values = changed(attn_implementation="fp8", bf16=True)
    assert "sm_90" in check(values, gpus="4xa100-80gb").errors[0].sentence
    assert not check(values, gpus="4xh100").errors


@here
def test_the_process_ends_with_the_program_that_asks() -> None:
    """In the middle of an import too."""
    program = (
        "import os; from course_tools.axolotl.check import validator as v\n"
        "print(v._start().pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    quiet = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=quiet, stdout=subprocess.PIPE, text=True)
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(timeout=60)


def test_without_axolotl_one_note_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator.importlib.util, "find_spec", lambda name: None)
    report = check(changed(gradiant_accumulation_steps=4, output_dir="./alpaca.jsonl/out"))
    assert [error.key for error in report.errors] == ["output_dir"], "the course's own rules need no schema"
    (note,) = [finding for finding in report.findings if finding.level == "note"]
    pinned = (ROOT / "requirements-no-deps.txt").read_text(encoding="utf-8")
    assert f"axolotl=={validator.AXOLOTL}" in note.fix and f"axolotl=={validator.AXOLOTL}" in pinned


@here
def test_the_rules_fill_in_axolotls_own_defaults() -> None:
    script = (
        "import json; from axolotl.utils.schemas.config import AxolotlInputConfig as A\n"
        "print('FIELDS', json.dumps({k: str(f.default) for k, f in A.model_fields.items()}))"
    )
    quiet = os.environ | validator.QUIET
    done = subprocess.run([sys.executable, "-c", script], env=quiet, capture_output=True, text=True, check=True)
    fields = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FIELDS"))[7:])
    assert {key: fields[key] for key in DEFAULTS} == {key: str(value) for key, value in DEFAULTS.items()}
