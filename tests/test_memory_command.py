"""`beyond memory`: what it prints is what `estimate` answers, and bad input ends with code 2."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.memory import PRESETS, estimate
from course_lib.memory.fitting import largest_micro_batch, longest_sequence
from course_tools.__main__ import main
from course_tools.planning.memory_command import CATEGORIES, options

ROOT = Path(__file__).resolve().parent.parent
QLORA = ["memory", "--model", "llama-3.1-8b", "--method", "qlora", "--activation-checkpointing", "full"]


def printed(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_json_is_the_estimate_and_what_fits_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(options()) == list(inspect.signature(estimate).parameters)[1:], "every setting is an option"
    settings = {"method": "qlora", "activation_checkpointing": "full", "lora_rank": 8}
    sizes = ["--micro-batch-size", "2", "--seq-len", "1024"]
    result = json.loads(printed(capsys, [*QLORA, *sizes, "--lora-rank", "8", "--card", "rtx4090", "--json"]))
    need = estimate("llama-3.1-8b", micro_batch_size=2, seq_len=1024, **settings)
    for name, value in need.as_dict().items():
        assert result[name] == value, name
    card = result["card"]
    assert card["fits"] is need.fits(24 * 2**30)
    assert card["largest_micro_batch"] == largest_micro_batch("llama-3.1-8b", "rtx4090", seq_len=1024, **settings)
    assert card["longest_sequence"] == longest_sequence("llama-3.1-8b", "rtx4090", micro_batch_size=2, **settings)
    assert json.loads(printed(capsys, [*QLORA, "--json"]))["card"] is None


def test_the_host_and_what_is_not_counted_are_part_of_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["memory", "--model", "llama-2-70b", "--strategy", "zero3", "--ranks", "8", "--offload", "all"]
    result = json.loads(printed(capsys, [*argv, "--loading", "whole", "--host-memory", "1TiB", "--json"]))
    parameters = PRESETS["llama-2-70b"].parameters
    assert result["host"] == {"loading": 8 * 2 * parameters, "training": 18 * parameters, "memory": 2**40}
    assert "does not fit" in printed(capsys, [*argv, "--host-memory", "1TiB"]).splitlines()[-1]
    assert "fits" == printed(capsys, [*argv, "--host-memory", "1.5TiB"]).split()[-1]
    mixture = ["memory", "--model", "qwen3-30b-a3b", "--method", "lora", "--card", "h200", "--json"]
    result = json.loads(printed(capsys, mixture))
    assert result["uncounted"] and result["card"]["fits"] is None  # PEFT may adapt its experts, too
    assert result["active_parameters"] == PRESETS["qwen3-30b-a3b"].active_parameters


def test_the_table_has_the_estimates_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, QLORA).splitlines()
    need = estimate("llama-3.1-8b", method="qlora", activation_checkpointing="full")
    for name, value in {name: getattr(need, name) for name in CATEGORIES}.items() | need.phases.items():
        assert any(line.startswith(name) and f" {value:,} " in line for line in lines), name
    assert [line for line in lines if "<- peak" in line] == [line for line in lines if line.startswith(need.peak_phase)]


def test_a_model_can_be_widths(capsys: pytest.CaptureFixture[str]) -> None:
    widths = "layers=4,hidden=128,heads=4,kv_heads=2,intermediate=352,vocab=256,tied=false"
    assert json.loads(printed(capsys, ["memory", "--model", widths, "--json"]))["peak"] == estimate("tiny").peak


def test_bad_input_ends_with_one_sentence_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, fragment in [
        (["--model", "llama-3.1-8bb"], "'llama-3.1-8bb'"),
        (["--model", "tiny", "--method", "qlor"], "'qlora'"),
        (["--model", "tiny", "--seq-len", "long"], "'long'"),
        (["--model", "tiny", "--seq-len", "0"], "seq_len=0"),
        (["--model", "tiny", "--card", "t4"], "t4"),
        (["--model", "tiny", "--lora", "8"], "--lora 8"),  # no abbreviations
        (["--model", "layers=2,hidden"], "hidden"),
        (["--model", "tiny", "--host-memory", "64"], "'64'"),
        (["--model", "tiny", "--per-node", "0"], "per_node=0"),
        (["--model", "tiny", "--method", "lora", "--eval-micro-batch-size", "-1"], "eval_micro_batch_size=-1"),
        (["--model", "tiny", "--transformers", "3"], "transformers=3"),
        (["--model", "tiny", "--train-embeddings"], "train_embeddings"),
        (["--model", "tiny", "--optimizer-in-backward", "--num-microbatches", "2"], "num_microbatches=1"),
        (["--model", "tiny", "--optimizer-in-backward", "--strategy", "ddp", "--ranks", "2"], "optimizer_in_backward"),
    ]:
        code, output = main(["memory", *argv]), capsys.readouterr()
        assert (code, output.out, output.err.count("\n")) == (2, "", 1), argv
        assert fragment in output.err, argv


def test_the_command_and_the_other_arithmetic_need_no_torch() -> None:
    code = (
        "import sys, course_lib.parallel.simulate, course_lib.parallel.traffic, course_lib.collectives.links\n"
        "from course_tools.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]) or 3 * ('torch' in sys.modules))"
    )
    argv = [sys.executable, "-c", code, *QLORA, "--card", "h200"]
    result = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
