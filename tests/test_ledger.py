"""The pair of a prediction and a measurement, in units that agree."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import assert_refused

from course_lib.notebook import ledger, progress
from course_lib.notebook.ledger import entries, measured, predict
from course_lib.stamp import stamp

GIB = 2**30


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("BEYOND_ONE_GPU_HOME", str(tmp_path))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    progress._store.cache_clear()
    monkeypatch.setattr(ledger, "_entries", {})


def test_the_pair_is_printed_with_its_residual_named_part_by_part(capsys):
    predict("peak of a ZeRO-2 step", 1.9, "GiB", lesson="05_deepspeed_zero")
    assert capsys.readouterr().out == ""
    parts = {"all-gather buffer": 0.1 * GIB, "fragmentation": 0.02 * GIB}
    entry = measured("peak of a ZeRO-2 step", 2.05 * GIB, "bytes", parts=parts)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    for number in ("1.9 GiB", "2.05 GiB", "+0.15 GiB", "+7.9 %", "all-gather buffer +0.1 GiB", "unexplained +0.03 GiB"):
        assert number in line, line
    assert (entry.unit, entry.lesson, entry.stamp) == ("GiB", "05_deepspeed_zero", stamp())
    assert (entry.residual, entry.percent, entry.unexplained) == pytest.approx((0.15, 100 * 0.15 / 1.9, 0.03))


def test_residuals_at_the_edges():
    for predicted, value, parts, expected in (
        (13_912_064, 13_912_064, {}, (0, 0, 0)),
        (0.3, 0.1 + 0.2 + 0.6, {"a": 0.5, "b": 0.1}, (pytest.approx(0.6), pytest.approx(200), 0)),  # no rounding noise
        (5, 5, {"slower": 1, "faster": -1}, (0, 0, 0)),
        (-2.0, -1.0, {}, (1, 50, 1)),
        (0, 3, {}, (3, None, 3)),
        (None, 3, {"start-up": 2}, (None, None, None)),  # not predicted: the lesson goes on
    ):
        predict("x", predicted, "s")
        entry = measured("x", value, parts=parts)
        assert (entry.residual, entry.percent, entry.unexplained) == expected, (predicted, value)


def test_units_of_one_kind_are_converted():
    for value, unit, other, expected in (
        (2**30, "bytes", "GiB", 1),
        (1, "GiB", "GB", 1.073741824),
        (3072, "KiB", "MiB", 3),
        (1500, "ms", "s", 1.5),
        (500, "MB/s", "GB/s", 0.5),
        (12, "steps", "steps", 12),
        (8, None, "", 8),
    ):
        predict("x", 7, other)
        entry = measured("x", value, unit)
        assert entry.measured == pytest.approx(expected, rel=1e-12) and entry.unit == other, (value, unit)


def test_wrong_units_values_and_names_are_refused():
    near = {
        "G": "GiB",
        "T ": "TiB",
        "gib": "'GiB'",
        "byte": "'bytes'",
        "sec": "'s'",
        "step": "'steps'",
        "parsec": "no unit",
    }
    for number in (math.nan, -math.inf, "1.9", ..., True, [1, 2], 1j, 10**400):
        assert_refused([(lambda number=number: predict("x", number, "s"), ValueError, "prediction of 'x'")])
    assert_refused((lambda unit=unit: predict("x", 1, unit), ValueError, right) for unit, right in near.items())
    assert_refused([(lambda unit=unit: predict("x", 1, unit), ValueError, "no unit") for unit in (None, 3, ["GiB"])])
    assert_refused([(lambda name=name: predict(name, 1, "s"), ValueError, "name") for name in ("", "  ", None, 3)])
    assert entries() == [] and progress.load().ledger == {}
    predict("peak of a step", 1, "GiB")
    predict("x", 1, "GB")
    assert_refused(
        [
            (lambda: measured("peak of the step", 1), ValueError, "'peak of a step'"),
            (lambda: measured("x", math.inf), ValueError, "measurement of 'x'"),
            (lambda: measured("x", 1, parts={"p": math.nan}), ValueError, "part 'p'"),
            (lambda: measured("x", 2, parts={"unexplained": 1}), ValueError, "unexplained"),
            (lambda: measured("x", 1, "GB/s"), ValueError, "GB/s"),
            (lambda: measured("x", 1, "M"), ValueError, "MiB"),
        ]
    )
    assert entries()[1].measured is None


def test_the_pair_is_kept_by_lesson_and_a_cell_that_runs_again_replaces_it(monkeypatch):
    assert predict("a", 1, "s").lesson == "scratch"
    monkeypatch.setattr(ledger, "_entries", {})
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/lessons/04_ddp.ipynb")
    for guess in (1, 2):
        entry = predict("a", guess, "s")
        assert measured("a", 3) is entry and entry.lesson == "04_ddp"
    predict("b", 2, "s", lesson="05_zero")
    predict("c", 3, "s")  # the lesson of the prediction before
    measured("c", 5, stamp={"device": "a card", "ranks": 8})
    assert [(entry.name, entry.predicted) for entry in entries()] == [("a", 2), ("b", 2), ("c", 3)]
    assert [entry.name for entry in entries("05_zero")] == ["b", "c"]
    kept = progress.load().ledger
    assert (kept["04_ddp"]["a"].predicted, kept["04_ddp"]["a"].measured, kept["05_zero"]["b"].measured) == (2, 3, None)
    assert (kept["05_zero"]["c"].measured, kept["05_zero"]["c"].stamp["ranks"]) == (5, 8)


def test_the_stamp_says_where_and_names_the_gpu_that_was_used(monkeypatch):
    here = stamp(ranks=4, backend="gloo")
    assert set(here) == {"device", "ranks", "backend", "torch", "python", "date"}
    assert (here["ranks"], here["backend"]) == (4, "gloo") and here["device"].endswith("cores")
    assert stamp(device="8 x a card")["device"] == "8 x a card"
    monkeypatch.setattr("course_lib.stamp._gpu_names", lambda: ["NVIDIA X", "NVIDIA X"])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.13.0+cu130"))
    assert stamp(backend="nccl")["device"] == stamp()["device"] == "NVIDIA X"
    assert stamp(backend="gloo")["device"].endswith("cores")
    # a page that only does the arithmetic does not wait for torch
    code = "import sys; from course_lib.stamp import stamp; stamp(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
