"""The command: exit codes, one sentence for what cannot be read, and no PyTorch in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from axolotl_yaml import GOOD, make_folder

from course_tools.axolotl import command

HEAVY = ("torch", "transformers", "axolotl", "datasets", "pydantic", "jsonschema")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("command") / "run")


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_exit_codes_and_one_sentence_for_what_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["good.yml", "--gpus", "4×24GiB", "--quick"]) == 0
    assert "nothing found that is wrong" in capsys.readouterr().out
    Path("wrong.yml").write_text(GOOD.replace("./alpaca.jsonl", "./nowhere.jsonl"))
    assert command.main(["wrong.yml", "--json", "--quick"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(one["key"], one["line"]) for one in found] == [("datasets[0].path", 3)]
    Path("tab.yml").write_text("a:\n\tb: 1\n")
    for argv in (
        ["nowhere.yml"],
        ["tab.yml"],
        ["good.yml", "--gpus", "4xh10"],
        ["good.yml", "--gpu", "4"],
        ["good.yml", "more.yml"],
        [],
    ):
        assert command.main(argv) == 2
        said = capsys.readouterr()
        assert not said.out and said.err.count("\n") == 1, said.err


@pytest.mark.parametrize(
    "text",
    [
        "datasets: 3",
        "fsdp_config: [1]",
        "deepspeed: {bf16: true, zero_optimization: []}",
        "deepspeed: {zero_optimization: {stage: true}}",
        "datasets: [[], null, 3, {path: [x]}]",
        "num_epochs: .nan",
        "save_steps: .inf",
        "micro_batch_size: 99999999999999999999",
        'base_model: "a\\0b"',
        "output_dir: " + "x" * 5000,
        "1: 2",
        "plugins: text",
        "a: &a [*a]",
        "val_set_size: -.inf",
        "sequence_len: 0",
        "tensor_parallel_size: 1000000",
        "lora_r: 1e400",
        "resume_from_checkpoint: [1]",
        "base_model: ./alpaca.jsonl",
        "base_model: ''",
    ],
)
def test_no_yaml_raises(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    key = text.split(":")[0]
    kept = "".join(line + "\n" for line in GOOD.splitlines() if key == "datasets" or not line.startswith(key + ":"))
    if key == "datasets":
        kept = kept.replace("datasets:\n  - path: ./alpaca.jsonl\n    ds_type: json\n    type: alpaca\n", "")
    Path("odd.yml").write_text(kept + text + "\n")
    assert command.main(["odd.yml", "--quick"]) in (0, 1)
    assert not capsys.readouterr().err


def test_a_check_imports_no_torch() -> None:
    script = (
        "import sys; from course_tools.axolotl.command import main; code = main(['good.yml', '--quick']); "
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
