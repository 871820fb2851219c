"""Axolotl's own validator in a process of its own: what it refuses and reads past, and when the process ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from axolotl_yaml import FSDP, LORA, QLORA, changed, make_folder

from course_tools.axolotl.check import check, validator
from course_tools.axolotl.check.settings import DEFAULTS, KINDS

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


REFUSED = [
    ({"base_model": None}, "base_model", "Field required", "add base_model"),
    ({"max_steps": "1e3"}, "max_steps", "valid integer", "write 1000"),
    ({"save_strategy": False, "saves_per_epoch": None}, "save_strategy", "valid string", 'save_strategy: "no"'),
    ({"micro_batch_size": 2.5}, "micro_batch_size", "fractional part", ""),
    ({"wandb_name": 12}, "wandb_name", "valid string", 'write wandb_name: "12"'),
    (LORA | {"load_in_8bit": "ture"}, "load_in_8bit", "valid boolean", ""),
    ({"datasets": []}, "datasets", "at least 1 item", ""),
    ({"chat_template": "chat_template.default"}, "chat_template", "should match pattern", ""),
    ({"chat_template": "chatlm"}, "chat_template", "should match pattern", "write chatml"),
    ({"batch_size": 8}, "gradient_accumulation_steps", "only one of", ""),
    ({"learning_rate": "fast"}, "learning_rate", "could not convert", ""),
    ({"val_set_size": 0, "eval_strategy": "epoch"}, "eval_strategy", "not supported with val_set_size == 0", ""),
    ({"load_in_4bit": True}, "load_in_4bit", "without setting an adapter", ""),
    (LORA | {"adapter": "qlora"}, "load_in_4bit", "to be True for qlora", ""),
    (LORA | {"adapter": "lorra"}, "adapter", "'lorra' is not built in", ""),
    (LORA | {"load_in_8bit": True, "lora_qkv_kernel": True}, "lora_qkv_kernel", "8-bit", ""),
    ({"fsdp": ["full_shard"]}, "fsdp", "no longer supported", ""),
    (FSDP | {"fsdp_version": 1}, "fsdp_version", "FSDP1 has been removed", ""),
    (fsdp(sharding_strategy="FULL_SHARD"), "fsdp_config", "sharding_strategy is an FSDP1-only option", ""),
    (FSDP | {"deepspeed": "zero3.json"}, "deepspeed", "cannot be used together", ""),
    (FSDP | {"optimizer": "adamw_bnb_8bit"}, "", "FSDP2 not compatible", ""),
    ({"attn_implementation": "flash"}, "attn_implementation", "Use the canonical name 'flash_attention_2'", ""),
    ({"save_steps": 2, "save_strategy": "epoch", "saves_per_epoch": None}, "save_strategy", "mismatch", ""),
    ({"max_memory": {0: "20GiB"}, "gpu_memory_limit": "20GiB"}, "gpu_memory_limit", "mutually exclusive", ""),
]
READ_PAST = [
    ({"gradiant_accumulation_steps": 4}, "gradiant_accumulation_steps", "write gradient_accumulation_steps"),
    ({"datasets": [{"path": "./alpaca.jsonl", "type": "alpaca", "tpye": 1}]}, "datasets[0].tpye", "write type"),
    (fsdp(reshard_after_foward=True), "fsdp_config.reshard_after_foward", "write reshard_after_forward"),
    (FSDP | {"reshard_after_forward": True}, "reshard_after_forward", "put it into fsdp_config"),
    (fsdp(micro_batch_size=1), "fsdp_config.micro_batch_size", "put it at the top level"),
    ({"liger_rope": True}, "liger_rope", "add axolotl.integrations.liger.LigerPlugin to plugins"),
]
ACCEPTED = [
    {},
    {"liger_rope": True, "plugins": ["axolotl.integrations.liger.LigerPlugin"]},
    {"model_type": "LlamaForCausalLM", "device_map": "auto"},  # an alias, and a key that takes anything
    {"max_steps": "1000", "micro_batch_size": 2.0, "learning_rate": "0.0001"},
    {"lr_scheduler": "rex"},
    {"lr_scheduler_kwargs": {"anything": 1}},
    QLORA,
    FSDP | {"optimizer": "adamw_torch_8bit"},
    {"micro_batch_size": 0},
    {"save_strategy": "step", "saves_per_epoch": None},
]


@here
@pytest.mark.parametrize(("changes", "key", "words", "fix"), REFUSED, ids=[key + "-" + w for _, key, w, _ in REFUSED])
def test_what_axolotl_refuses_is_an_error_in_its_words(changes: dict, key: str, words: str, fix: str) -> None:
    errors = [one for one in check(changed(**changes)).errors if "Axolotl refuses it" in one.sentence]
    assert len(errors) == 1, [str(one) for one in errors]
    assert errors[0].key == key and words in errors[0].sentence and fix in errors[0].fix
    assert "\n" not in str(errors[0])


@here
@pytest.mark.parametrize(("changes", "key", "fix"), READ_PAST, ids=[key for _, key, _ in READ_PAST])
def test_keys_that_axolotl_reads_past_are_errors_with_what_was_meant(changes: dict, key: str, fix: str) -> None:
    (error,) = check(changed(**changes)).errors
    assert (error.key, error.fix) == (key, fix)
    assert "reads past it" in error.sentence or "a plugin that the YAML does not load" in error.sentence


@here
@pytest.mark.parametrize("changes", ACCEPTED, ids=str)
def test_what_axolotl_takes_is_no_error(changes: dict) -> None:
    report = check(changed(**changes))
    assert not report.errors, [str(one) for one in report.errors]


@here
def test_names_and_plugins_that_do_not_exist_and_keys_with_nothing() -> None:
    values = changed(optimizer="adamw_torh", plugins=["nobody.There"], herkey=1) | {"nothing": None}
    said = {one.key: one for one in check(values).findings}
    assert said["optimizer"].level == "warning" and said["optimizer"].fix == "write adamw_torch"
    assert said["plugins"].level == "note" and "No module named 'nobody'" in said["plugins"].sentence
    assert said["herkey"].level == "note" and "nobody.There" in said["herkey"].sentence
    assert said["nothing"].level == "note"


@here
def test_the_cards_are_pretended() -> None:
    values = changed(attn_implementation="fp8", bf16=True)
    assert "sm_90" in check(values, gpus="4xa100-80gb").errors[0].sentence
    assert not check(values, gpus="4xh100").errors


@here
def test_what_no_json_can_hold_is_a_note() -> None:
    values = changed()
    values["max_memory"] = {(1, 2): 3}
    (note,) = check(values).findings
    assert note.level == "note" and "no JSON can hold" in note.sentence


@here
def test_an_interrupt_ends_the_process_and_the_next_question_starts_another(monkeypatch) -> None:
    assert not check(changed()).errors
    old = validator._process
    monkeypatch.setattr(validator, "_answer", lambda process: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5))
    with pytest.raises(KeyboardInterrupt):
        check(changed())
    monkeypatch.undo()
    assert old is not None and old.returncode is not None and validator._process is None


@here
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
@pytest.mark.parametrize("ready", [False, True], ids=["while it imports", "when it is ready"])
def test_the_process_ends_with_the_program_that_asks(folder: Path, ready: bool) -> None:
    program = (
        "import threading, time; from pathlib import Path; from course_tools.axolotl.check import validator as v\n"
        "ask = lambda: v.ask({'base_model': 'x'}, v.pretended(None), Path('.'))\n"
        + ("ask()\n" if ready else "threading.Thread(target=ask, daemon=True).start()\n")
        + "while v._process is None: time.sleep(0.01)\n"
        "print(v._process.pid, flush=True); time.sleep(100)\n"
    )
    program_env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=program_env, stdout=subprocess.PIPE, text=True
    ) as asking:
        timer = threading.Timer(150, asking.kill)
        timer.start()
        assert asking.stdout is not None
        pid = int(asking.stdout.readline())
        timer.cancel()
        assert Path(f"/proc/{pid}").exists()
        asking.kill()
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z":
        assert time.monotonic() < until, "the validator outlives the program that asked"
        time.sleep(0.1)


def test_without_axolotl_one_note_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator.importlib.util, "find_spec", lambda name: None)
    report = check(changed(gradiant_accumulation_steps=4, output_dir="./alpaca.jsonl/out"))
    assert [one.key for one in report.errors] == ["output_dir"], "the course's own rules need no schema"
    (note,) = [one for one in report.findings if one.level == "note"]
    pinned = (ROOT / "requirements-no-deps.txt").read_text(encoding="utf-8")
    assert f"axolotl=={validator.AXOLOTL}" in note.fix and f"axolotl=={validator.AXOLOTL}" in pinned


@here
def test_the_rules_ask_for_keys_and_defaults_that_axolotl_has() -> None:
    script = (
        "import json; from axolotl.utils.schemas.config import AxolotlInputConfig as A\n"
        "print('FIELDS', json.dumps({k: str(f.default) for k, f in A.model_fields.items()}))"
    )
    quiet = os.environ | validator.QUIET
    done = subprocess.run([sys.executable, "-c", script], env=quiet, capture_output=True, text=True, check=True)
    fields = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FIELDS"))[7:])
    nested = {"path", "type", "split", "field", "weight", "length", "shards", "field_messages", "message_field_role"}
    nested |= {"message_field_content", "message_property_mappings", "state_dict_type", "final_state_dict_type"}
    nested |= {"offload_params", "cpu_ram_efficient_loading", "activation_checkpointing"}
    plugins = {"liger_fused_linear_cross_entropy", "cut_cross_entropy"}
    assert KINDS.keys() - nested - plugins <= fields.keys()
    assert {key: fields[key] for key in DEFAULTS} == {key: str(value) for key, value in DEFAULTS.items()}
