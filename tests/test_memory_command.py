"""`beyond memory`: the table, the JSON, and one sentence for what means nothing."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.memory import estimate
from course_lib.memory.fitting import largest_micro_batch, longest_sequence
from course_tools.__main__ import main
from course_tools.planning.memory_command import CATEGORIES, options

ROOT = Path(__file__).resolve().parent.parent
QLORA = ["memory", "--model", "llama-3.1-8b", "--method", "qlora", "--activation-checkpointing", "full"]


def test_every_setting_of_estimate_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(options()) == list(inspect.signature(estimate).parameters)[1:]
    with pytest.raises(SystemExit) as left:
        main(["memory", "--help"])
    page = capsys.readouterr().out
    assert left.value.code == 0
    for name in options():
        assert f"--{name.replace('_', '-')} " in page


def test_json_is_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "method": "qlora",
        "activation_checkpointing": "full",
        "micro_batch_size": 2,
        "seq_len": 1024,
        "lora_rank": 8,
    }
    argv = [*QLORA, "--micro-batch-size", "2", "--seq-len", "1024", "--lora-rank", "8", "--card", "rtx4090", "--json"]
    assert main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    need = estimate("llama-3.1-8b", **settings)
    for name, value in need.as_dict().items():
        assert told[name] == value, name
    del settings["micro_batch_size"]
    assert told["card"]["fits"] is need.fits(24 * 2**30)
    assert told["card"]["largest_micro_batch"] == largest_micro_batch("llama-3.1-8b", "rtx4090", **settings)
    settings = settings | {"micro_batch_size": 2}
    del settings["seq_len"]
    assert told["card"]["longest_sequence"] == longest_sequence("llama-3.1-8b", "rtx4090", **settings)
    assert told["settings"]["lora_rank"] == 8 and told["model"] == "llama-3.1-8b"


def test_without_a_card_nothing_is_said_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QLORA, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["card"] is None
    assert main(QLORA) == 0
    assert "fit" not in capsys.readouterr().out


def test_the_table_reads_as_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QLORA, "--card", "a100-80gb"]) == 0
    lines = capsys.readouterr().out.splitlines()
    need = estimate("llama-3.1-8b", method="qlora", activation_checkpointing="full")
    rows = {line[:30].strip(): line[30:].split() for line in lines}
    for name, value in {name: getattr(need, name) for name in CATEGORIES}.items() | need.phases.items():
        assert rows[name][:2] == [f"{value:,}", f"{value / 2**30:.2f}"], name
    assert [line for line in lines if "<- peak" in line] == [line for line in lines if line.startswith(need.peak_phase)]
    assert "a100-80gb (80.0 GiB): fits" in lines
    assert "settings: method=qlora, activation_checkpointing=full" in lines
    assert main(["memory", "--model", "llama-3.1-8b", "--card", "24GiB"]) == 0
    told = capsys.readouterr().out
    assert "24GiB (24.0 GiB): does not fit: " in told and "largest micro-batch at this length: 0" in told


def test_a_model_can_be_widths(capsys: pytest.CaptureFixture[str]) -> None:
    widths = "layers=4,hidden=128,heads=4,kv_heads=2,intermediate=352,vocab=256,tied=false"
    assert main(["memory", "--model", widths, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["peak"] == estimate("tiny").peak


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model", "llama-3.1-8bb"], "No model is called 'llama-3.1-8bb': the nearest are llama-3.1-8b, "),
        (["--model", "tiny", "--method", "qlor"], "method='qlor' is no choice: did you mean 'qlora'?"),
        (
            ["--model", "tiny", "--seq-len", "long"],
            "Argument --seq-len: invalid int value: 'long' (--help lists the options).",
        ),
        (["--model", "tiny", "--seq-len", "0"], "seq_len=0: give a whole number of at least 1."),
        (
            ["--model", "tiny", "--tensor-parallel", "3"],
            "tiny: 4 attention heads do not divide over 3 tensor-parallel ranks",
        ),
        (["--model", "tiny", "--card", "t4"], "A t4 has no bf16: take precision='fp16-mixed', or 'fp32'."),
        (["--model", "tiny", "--card", "a101"], "No card is called 'a101': the nearest are "),
        (["--model", "tiny", "--lenght", "8"], "Unrecognized arguments: --lenght 8 (--help lists the options)."),
        (["--model", "tiny", "--lora", "8"], "Unrecognized arguments: --lora 8 (--help lists the options)."),
        (["--json"], "The following arguments are required: --model (--help lists the options)."),
        (["--model", "layers=2,hidden"], "--model hidden: give a width as name=number, or name=true for a property."),
        (["--model", "layers=2,hidden=8,heads=2"], "A shape needs layers, hidden, heads and vocab: vocab is missing."),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", *argv]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(sentence) and told.err.count("\n") == 1


def test_other_commands_still_refuse_what_they_do_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["progress", "--model", "tiny"]) == 2
    assert "Unrecognized arguments: --model tiny" in capsys.readouterr().err


def test_the_command_starts_without_torch() -> None:
    code = "import sys; from course_tools.__main__ import main; code = main(sys.argv[1:]); print('torch' in sys.modules, code)"
    argv = [*QLORA, "--card", "h200"]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False 0", done.stderr
