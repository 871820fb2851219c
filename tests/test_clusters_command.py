"""`beyond cluster`: files written, files shown, the options explained, one sentence for bad input."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from course_tools.clusters import Job, options_of
from course_tools.clusters.command import main, parser


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An Axolotl YAML in the folder from which the files are written."""
    monkeypatch.chdir(tmp_path)
    Path("run.yml").write_text("base_model: tiny\n", encoding="utf-8")
    return "run.yml"


def test_the_command_writes_shows_and_explains(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--target", "slurm", "--config", config, "--nodes", "2", "--gpus-per-node", "8", "--set", "partition=gpu"]
    assert main(["write", *argv, "--out", "my files", "--env", "A=b=c"]) == 0
    assert "to start it: sbatch 'my files/job.sbatch'" in capsys.readouterr().out
    text = Path("my files/job.sbatch").read_text(encoding="utf-8")
    assert "#SBATCH --partition=gpu" in text and "export A=b=c" in text
    assert main(["show", *argv]) == 0
    assert "#SBATCH --partition=gpu" in capsys.readouterr().out and not Path("launch").exists()
    assert main(["options", "--target", "kubernetes"]) == 0
    page = capsys.readouterr().out
    assert all(name in page for name in options_of("kubernetes"))
    assert main(["write", "--target", "torchrun", "--config", config, "--nodes", "2"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("gpus_per_node is missing") and told.err.count("\n") == 1 and not told.out
    for bad in (["write", *argv, "--env", "A"], ["write", "--nodes", "two"], ["write", *argv, "--out", config], []):
        assert main(bad) == 2
        assert capsys.readouterr().err.count("\n") == 1
    verbs = parser()._subparsers._group_actions[0].choices
    settings = {action.dest for action in verbs["write"]._actions}
    names = {"set": "options", "secret": "secrets"}
    assert {names.get(name, name) for name in settings} >= {one.name for one in fields(Job)}
