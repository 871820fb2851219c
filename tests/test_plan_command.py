"""`beyond plan`: the table, the JSON, the files, and one sentence for what means nothing or does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from course_tools.planning import plan
from course_tools.planning.plan_command import main

ROOT = Path(__file__).resolve().parent.parent
ASKED = ["--model", "llama-3.1-8b", "--gpus", "2x24GiB", "--top", "3"]
SMALL = [*ASKED, "--method", "qlora"]
GIB = 2**30


def answer(method="qlora", **how):
    """What the command asks."""
    return plan(
        "llama-3.1-8b",
        "2x24GiB",
        global_batch=32,
        seq_len=2048,
        methods=(method,),
        keep=3,
        axes=("dp", "tp", "pp"),
        **how,
    )


def test_the_table_reads_as_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _printed(capsys, [*ASKED, "--method", "full", "--tokens", "300M"]).splitlines()
    found = answer("full", tokens=3e8)
    assert lines[0] == "llama-3.1-8b, 8.03 billion parameters, on 2 x 24GiB (24.0 GiB each)"
    assert lines[2] == found.note
    for number, one in enumerate(found.plans, 1):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{number} "))
        assert f"{one.memory_bytes / GIB:.1f}" in lines[at] and f"{one.mfu:.1%}" in lines[at]
        assert lines[at].endswith(f"{one.days:.3g}") and f"{one.micro_batch_size} x {one.num_microbatches}" in lines[at]
        assert lines[at + 1].strip() == f"limited by {one.limit}"
    refused = [line.strip() for line in lines[lines.index("did not fit") :][1:] if line.startswith("  ")]
    assert refused == [one.sentence for one in found.refused] and refused
    assert lines[-1].startswith("Write plan 1: the same with --write ")
    assert "days" not in _printed(capsys, SMALL).splitlines()[4]


def _printed(capsys, argv) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_json_is_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    told, found = json.loads(_printed(capsys, [*SMALL, "--json"])), answer()
    assert len(told["plans"]) == len(found.plans)
    for given, one in zip(told["plans"], found.plans, strict=True):
        for name in (
            "strategy",
            "method",
            "dp",
            "tp",
            "micro_batch_size",
            "offload",
            "memory_bytes",
            "step_seconds",
            "mfu",
        ):
            assert given[name] == getattr(one, name)
        assert sum(given["parts"].values()) == pytest.approx(one.step_seconds)
        assert "accelerate" in given["targets"] or given["tp"] * given["pp"] > 1
    assert [one["needs"] for one in told["refused"]] == [one.needs for one in found.refused]
    assert told["searched"] == found.searched and told["written"] == []


def test_writing_takes_the_best_plan_that_the_target_can_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = _printed(capsys, [*SMALL, "--write", "axolotl", "--out", str(tmp_path / "run")])
    path = tmp_path / "run" / "axolotl.yml"
    assert yaml.safe_load(path.read_text())["adapter"] == "qlora"
    assert printed.splitlines()[-1].startswith(f"wrote {path}: plan ")
    full = ["--model", "tiny", "--gpus", "2xcpu", "--method", "lora", "--method", "full", "--seq-len", "128"]
    printed = _printed(capsys, [*full, "--write", "torchrun", "--out", str(tmp_path)])
    wrote = printed.splitlines()[-1]
    assert "wrote" in wrote and "plan 1 is not for torchrun: The course's own programs train lora" in printed
    assert "course_lib.training" in (tmp_path / "torchrun.sh").read_text()
    assert main([*SMALL, "--write", "fsdp", "--top", "1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("None of these plans is for fsdp: This file is FSDP2, and ")


def test_long_sequences_are_split_and_short_ones_only_when_told(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["--model", "llama-3.1-70b", "--gpus", "8x8xh100-80gb", "--method", "full", "--global-batch", "16", "--json"]

    def widest(*more: str) -> int:
        return max(one["cp"] for one in json.loads(_printed(capsys, [*ask, *more]))["plans"])

    assert widest("--seq-len", "131072") > 1
    assert widest("--seq-len", "131072", "--no-context-parallel") == 1 == widest("--seq-len", "4096")


def test_what_cannot_hold_the_model_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ["--model", "llama-3.1-405b", "--gpus", "t4", "--method", "full"]
    assert main(nowhere) == 1
    told = capsys.readouterr()
    assert told.out == "" and "GiB" in told.err and "llama-3.1-405b" in told.err
    assert main([*nowhere, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["plans"] == [] and told["missing_bytes"] > 0 and told["would"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--gpus", "2x24GiB"], "The following arguments are required: --model (--help lists the options)."),
        (
            ["--model", "llama-3.1-8bb", "--gpus", "2x24GiB"],
            "No model is called 'llama-3.1-8bb': the nearest are llama-3.1-8b",
        ),
        (["--model", "tiny", "--gpus", "2xh1000"], "No card is called 'h1000'"),
        ([*SMALL, "--method", "qlor"], "--method='qlor' is no choice: did you mean 'qlora'?"),
        ([*SMALL, "--write", "axolotle"], "--write='axolotle' is no choice: did you mean 'axolotl'?"),
        ([*SMALL, "--tokens", "many"], "--tokens many: give a number of tokens, such as 300M, 1.4T or 15e12."),
        ([*SMALL, "--top", "0"], "--top 0: give a whole number of at least 1."),
        ([*SMALL, "--global-batch", "0"], "global_batch=0: give a whole number of at least 1."),
        ([*SMALL, "--precision", "fp8"], "--precision='fp8' is no choice:"),
        ([*SMALL, "--seq", "8"], "Unrecognized arguments: --seq 8 (--help lists the options)."),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(sentence) and told.err.count("\n") == 1


def test_it_starts_without_torch(tmp_path: Path) -> None:
    code = "import sys; from course_tools.planning.plan_command import main; code = main(sys.argv[1:]); print('torch' in sys.modules, code)"
    argv = [*SMALL, "--write", "axolotl", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False 0", done.stderr
