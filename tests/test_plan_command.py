"""`beyond plan`: the table, the JSON, the files, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from course_tools.planning import machines, plan
from course_tools.planning.plan_command import main

ASKED = ["--model", "llama-3.1-8b", "--gpus", "2x24GiB", "--top", "3"]
SMALL = [*ASKED, "--method", "qlora"]
GIB = 2**30


def answer(method: str, **how):
    """What the command asks."""
    usual = {"seq_len": 2048, "keep": 3}
    return plan("llama-3.1-8b", machines("2x24GiB", host_memory=144 * GIB), methods=(method,), **usual, **how)


def printed(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_the_table_and_the_json_are_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, [*ASKED, "--method", "full", "--tokens", "300M", "--host-memory", "144GiB"]).splitlines()
    expected = answer("full", tokens=3e8)
    for number, each in enumerate(expected.plans, 1):
        row = next(i for i, line in enumerate(lines) if line.startswith(f"{number} "))
        for cell in (
            f"{each.memory_bytes / GIB:.1f}",
            f"{each.mfu:.1%}",
            f"{each.days:.3g} days" if each.days >= 2 else f"{24 * each.days:.3g} h",
        ):
            assert cell in lines[row]
        assert each.limit in lines[row + 1]
    assert expected.refused and all(refused.sentence in "\n".join(lines) for refused in expected.refused)
    result, expected = json.loads(printed(capsys, [*SMALL, "--json"])), answer("qlora")
    assert len(result["plans"]) == len(expected.plans)
    names = ("strategy", "method", "dp", "tp", "micro_batch_size", "offload", "memory_bytes", "step_seconds", "mfu")
    for given, each in zip(result["plans"], expected.plans, strict=True):
        assert {name: given[name] for name in names} == {name: getattr(each, name) for name in names}
        assert sum(given["parts"].values()) == pytest.approx(each.step_seconds)
        assert "accelerate" in given["targets"] or given["tp"] * given["pp"] > 1
    assert [refused["needs"] for refused in result["refused"]] == [refused.needs for refused in expected.refused]


def test_writing_takes_the_best_plan_that_the_target_can_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "axolotl.yml"
    assert str(path) in printed(capsys, [*SMALL, "--write", "axolotl", "--out", str(tmp_path / "run")])
    assert yaml.safe_load(path.read_text())["adapter"] == "qlora"
    adapters = [*ASKED[:4], "--method", "qlora", "--method", "lora", "--write", "deepspeed", "--out", str(tmp_path)]
    assert "plan 1 is not" in printed(capsys, adapters)
    assert json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"]
    assert main([*SMALL, "--strategy", "ddp", "--write", "deepspeed", "--out", str(tmp_path)]) == 2
    assert "deepspeed" in capsys.readouterr().err


def test_where_no_target_writes_the_best_plan_it_says_why_and_offers_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask = ["--model", "llama-3.1-405b", "--gpus", "16384xh100", "--tokens", "15.6e12", "--seq-len", "8192"]
    plans = json.loads(printed(capsys, [*ask, "--json"]))["plans"]
    assert not any(one["targets"] for one in plans)
    why, megatron = printed(capsys, ask).splitlines()[-2:]
    assert f"pp={plans[0]['pp']}" in why and f"--pipeline-model-parallel-size {plans[0]['pp']} " in megatron
    assert ("--use-distributed-optimizer" in megatron) == (plans[0]["strategy"] == "zero1")
    ask = ["--model", "llama-3.1-8b", "--gpus", "8xh100", "--method", "full", "--seq-len", "131072"]
    ask += ["--strategy", "single", "--strategy", "fsdp"]
    plans = json.loads(printed(capsys, [*ask, "--json"]))["plans"]
    assert not plans[0]["targets"] and "No target writes plan 1" in printed(capsys, ask)


def test_the_question_chooses_the_method_and_the_options_choose_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    def asked(*more: str) -> dict:
        return json.loads(printed(capsys, ["--model", "qwen3-4b", "--gpus", "8xa100-80gb", "--json", *more]))

    assert {each["method"] for each in asked()["plans"]} == {"lora", "qlora"}
    assert {each["method"] for each in asked("--tokens", "1e9")["plans"]} == {"full"}
    wide = asked("--method", "full", "--optimizer", "adamw8bit", "--strategy", "ddp", "--loss", "fused")["plans"]
    assert {(each["optimizer"], each["strategy"]) for each in wide} == {("adamw8bit", "ddp")}
    assert wide[0]["memory"]["logits"] < asked("--method", "full")["plans"][0]["memory"]["logits"]
    assert {each["offload"] for each in asked("--method", "full", "--offload", "optimizer")["plans"]} == {"optimizer"}
    pcie, switch = (asked("--inside", link, "--strategy", "fsdp")["plans"][0] for link in ("pcie3", "nvswitch-a100"))
    assert pcie["parts"]["data parallelism"] > switch["parts"]["data parallelism"]
    assert max(each["cp"] for each in asked("--method", "full", "--seq-len", "65536")["plans"]) > 1


def test_what_does_not_fit_and_bad_input_are_code_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ["--model", "llama-3.1-405b", "--gpus", "t4", "--method", "full"]
    assert main(nowhere) == 2
    result = capsys.readouterr()
    assert result.out == "" and "GiB" in result.err and "llama-3.1-405b" in result.err
    assert main([*nowhere, "--json"]) == 2
    result = json.loads(capsys.readouterr().out)
    assert result["plans"] == [] and result["missing_bytes"] > 0 and result["would"]
    rows = [
        (["--gpus", "2x24GiB"], "--model"),
        (["--model", "llama-3.1-8bb", "--gpus", "2x24GiB"], "llama-3.1-8b"),
        ([*ASKED[:3], "0"], "0"),
        ([*ASKED[:3], "3x"], "4x24GiB"),
        ([*ASKED[:3], "100xh100"], "12x8xh100"),
        ([*ASKED[:3], "2xh101"], "h100"),
        ([*SMALL, "--method", "qlor"], "'qlora'"),
        ([*SMALL, "--tokens", "many"], "--tokens many"),
        ([*SMALL, "--top", "0"], "--top 0"),
        ([*SMALL, "--global-batch", "0"], "global_batch=0"),
        ([*SMALL, "--seq", "8"], "--seq 8"),
        ([*SMALL, "--between", "ethernet-9"], "ethernet-25"),
        ([*ASKED[:3], "8xh100+2xt4"], "mixes"),
        ([*ASKED[:3], "1x4090"], "rtx4090"),
    ]
    for argv, fragment in rows:
        code, result = main(argv), capsys.readouterr()
        assert (code, result.out, result.err.count("\n")) == (2, "", 1) and fragment in result.err, (argv, result)
