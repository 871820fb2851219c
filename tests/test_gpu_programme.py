"""The GPU programme's own rules: what it refuses, what it keeps, how it counts. `make gpu SMALL=1` runs its parts."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
import torch

from benchmarks.gpu import memory, running
from benchmarks.gpu.__main__ import main, no_gpu
from benchmarks.gpu.running import PARTS, Part, Row
from course_lib.notebook.recordings import FOLDER, recorded


def skips() -> Iterable[Row]:
    yield "step", "before", {"allocated": 3}
    __import__("a_package_that_nobody_has")


def breaks() -> Iterable[Row]:
    yield "step", "half", {"allocated": float("inf")}
    raise RuntimeError("planted")


@pytest.fixture
def part(tmp_path, monkeypatch):
    """A part of two pieces, one that lacks a package and one that breaks half-way."""
    pieces = type("pieces", (), {"pieces": staticmethod(lambda part: iter([("first", skips), ("second", breaks)]))})
    monkeypatch.setattr(running.importlib, "import_module", lambda name: pieces)
    return lambda: Part("memory", torch.device("cpu"), small=True, folder=tmp_path, command="make gpu")


def test_what_a_part_measured_is_kept_whatever_breaks(part, tmp_path, capsys):
    assert part().run() == 1
    rows = {row["name"]: row for row in json.loads((tmp_path / "memory.json").read_text())["rows"]}
    assert rows["before"]["allocated"] == 3 and rows["half"]["allocated"] == "inf"
    assert rows["first"]["kind"] == "skipped" and "a_package_that_nobody_has" in rows["first"]["why"]
    assert rows["second"]["kind"] == "failed" and rows["second"]["why"] == "RuntimeError: planted"
    capsys.readouterr()
    again = part()
    again.ends = 0  # its time is up
    assert again.run("second") == 0
    assert sorted(again.rows) == [("skipped", "first"), ("skipped", "second"), ("step", "before"), ("step", "half")]
    assert "ONLY='second'" in capsys.readouterr().out
    with pytest.raises(ValueError, match="third"):
        part().run("third")


def test_another_machines_rows_are_not_mixed_in(part, tmp_path):
    part().run()
    found = json.loads((tmp_path / "memory.json").read_text())
    found["stamp"]["device"] = "another card"
    (tmp_path / "memory.json").write_text(json.dumps(found))
    assert part().rows == {}


def step(
    name: str, held_out: bool, predicted: int, reserved: int | None, fits: bool = True, loss: str = "eager"
) -> dict:
    row = {"kind": "step", "name": name, "held_out": held_out, "loss": loss, "predicted_fits": fits}
    row |= {"predicted_allocated": predicted, "predicted_reserved": predicted}
    return row | (
        {"out_of_memory": "x"} if reserved is None else {"allocated": reserved, "reserved": reserved, "context": 0}
    )


def test_the_table_keeps_held_out_rows_apart_and_counts_what_was_wrong_about_fitting():
    rows = [step("a", False, 110, 100), step("b", False, 104, 100), step("c", True, 150, 100), step("d", True, 9, None)]
    lines = list(memory.table([*rows, step("e", False, 900, 100, loss="chunked"), {"kind": "skipped", "name": "f"}]))
    said = "\n".join(lines)
    assert "to fit, reserved: median 7.0%, worst 10.0% of 2 rows" in said and "8% and 15%: met" in said
    assert "held out, reserved: median 50.0%, worst 50.0% of 1 rows" in said and "MISSED" in said
    assert "to fit, fits: wrong for 0 of 2 rows" in said and "held out, fits: wrong for 1 of 2 rows d" in said


def test_the_cases_differ_and_a_third_of_them_is_held_out():
    cases = memory.cases()
    assert len({case.name for case in cases}) == len(cases) >= 24
    assert len(cases) / 4 < sum(case.held_out for case in cases) < len(cases) / 2
    for case in cases:
        settings = memory.DEFAULTS | case.settings
        assert memory.estimate(case.model, **settings).peak > 0 and bool(case.fill) == (
            "micro_batch_size" not in settings
        )


def test_recordings_are_of_gpus_and_are_shown_with_their_stamp(part, tmp_path, capsys):
    assert recorded("memory", "step", folder=tmp_path) == [] and capsys.readouterr().out == ""
    part().run()
    capsys.readouterr()
    (row, _) = recorded("memory", "step", folder=tmp_path)
    assert row["name"] == "before" and torch.__version__ in capsys.readouterr().out
    for path in FOLDER.glob("*"):
        content = json.loads(path.read_text())
        assert path.stem in PARTS and content["stamp"]["gpu"] and not content["stamp"]["small"]


def test_what_cannot_run_is_refused_in_a_sentence(capsys):
    for words, said in (
        (["--small", "9"], "'9'"),
        (["--small", "--out", str(FOLDER)], "recordings/"),
        (["--all"], "--all"),
    ):
        assert main(words) == 2 and said in capsys.readouterr().err
    if no_gpu():
        assert main([]) == 2 and "SMALL=1" in capsys.readouterr().err
