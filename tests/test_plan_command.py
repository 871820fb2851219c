"""`beyond plan`: the table, the JSON, the files, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from course_tools.planning import plan
from course_tools.planning.plan_command import main

ASKED = ["--model", "llama-3.1-8b", "--gpus", "2x24GiB", "--top", "3"]
SMALL = [*ASKED, "--method", "qlora"]
GIB = 2**30


def answer(method: str, **how):
    """What the command asks."""
    usual = {"global_batch": 32, "seq_len": 2048, "keep": 3, "axes": ("dp", "tp", "pp")}
    return plan("llama-3.1-8b", "2x24GiB", methods=(method,), **usual, **how)


def printed(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_the_table_and_the_json_are_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, [*ASKED, "--method", "full", "--tokens", "300M"]).splitlines()
    expected = answer("full", tokens=3e8)
    for number, each in enumerate(expected.plans, 1):
        row = next(i for i, line in enumerate(lines) if line.startswith(f"{number} "))
        for cell in (f"{each.memory_bytes / GIB:.1f}", f"{each.mfu:.1%}", f"{each.days:.3g}"):
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
    adapters = [*ASKED[:4], "--method", "lora", "--method", "qlora", "--write", "fsdp", "--out", str(tmp_path)]
    assert "plan 1 is not" in printed(capsys, adapters)
    assert "fully_shard" in (tmp_path / "fsdp_plan.py").read_text()
    assert main([*SMALL, "--write", "fsdp", "--top", "1", "--out", str(tmp_path)]) == 2
    assert "fsdp" in capsys.readouterr().err


def test_where_no_target_writes_the_best_plan_it_says_why_and_offers_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask = ["--model", "llama-3.1-405b", "--gpus", "64x8xh100-80gb", "--method", "full"]
    ask += ["--seq-len", "8192", "--global-batch", "512"]
    plans = json.loads(printed(capsys, [*ask, "--json"]))["plans"]
    number = next(i for i, one in enumerate(plans, 1) if one["targets"])
    why, megatron, offer = printed(capsys, ask).splitlines()[-3:]
    assert f"pp={plans[0]['pp']}" in why and number > 1 and f"Write plan {number}:" in offer
    assert f"--pipeline-model-parallel-size {plans[0]['pp']} " in megatron
    assert ("--use-distributed-optimizer" in megatron) == (plans[0]["strategy"] == "zero1")
    why, offer = printed(capsys, ["--model", "llama-3.1-70b", "--gpus", "4x8xh100-80gb"]).splitlines()[-2:]
    assert "No target" in why and "Write plan" in offer, "adapters are nothing for Megatron-LM"


def test_long_sequences_are_split_and_short_ones_only_when_told(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["--model", "llama-3.1-70b", "--gpus", "8x8xh100-80gb", "--method", "full", "--global-batch", "16", "--json"]

    def widest(*more: str) -> int:
        return max(each["cp"] for each in json.loads(printed(capsys, [*ask, *more]))["plans"])

    assert widest("--seq-len", "131072") > 1
    assert widest("--seq-len", "131072", "--no-context-parallel") == 1 == widest("--seq-len", "4096")


def test_what_does_not_fit_is_code_1_and_bad_input_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ["--model", "llama-3.1-405b", "--gpus", "t4", "--method", "full"]
    assert main(nowhere) == 1
    result = capsys.readouterr()
    assert result.out == "" and "GiB" in result.err and "llama-3.1-405b" in result.err
    assert main([*nowhere, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["plans"] == [] and result["missing_bytes"] > 0 and result["would"]
    rows = [
        (["--gpus", "2x24GiB"], "--model"),
        (["--model", "llama-3.1-8bb", "--gpus", "2x24GiB"], "llama-3.1-8b"),
        ([*SMALL, "--method", "qlor"], "'qlora'"),
        ([*SMALL, "--tokens", "many"], "--tokens many"),
        ([*SMALL, "--top", "0"], "--top 0"),
        ([*SMALL, "--global-batch", "0"], "global_batch=0"),
        ([*SMALL, "--seq", "8"], "--seq 8"),
    ]
    for argv, fragment in rows:
        code, result = main(argv), capsys.readouterr()
        assert (code, result.out, result.err.count("\n")) == (2, "", 1) and fragment in result.err, (argv, result)
