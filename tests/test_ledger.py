"""The pair of a prediction and a measurement, in units that agree."""

import math
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from course_lib.notebook import ledger, progress
from course_lib.notebook.ledger import entries, measured, predict, stamp

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
    assert capsys.readouterr().out == (
        "peak of a ZeRO-2 step: predicted 1.9 GiB, measured 2.05 GiB, residual +0.15 GiB (+7.9 %): "
        "all-gather buffer +0.1 GiB, fragmentation +0.02 GiB, unexplained +0.03 GiB\n"
    )
    assert (entry.unit, entry.lesson) == ("GiB", "05_deepspeed_zero")
    assert entry.residual == pytest.approx(0.15) and entry.percent == pytest.approx(100 * 0.15 / 1.9)
    assert entry.unexplained == pytest.approx(0.03)


def test_an_exact_prediction_has_nothing_to_explain(capsys):
    predict("bytes a rank a step", 13_912_064, "bytes")
    measured("bytes a rank a step", 13_912_064)
    assert capsys.readouterr().out == (
        "bytes a rank a step: predicted 13,912,064 bytes, measured 13,912,064 bytes, residual 0 bytes (+0.0 %)\n"
    )


def test_parts_that_explain_all_leave_no_rounding_noise(capsys):
    predict("x", 0.3, "s")
    measured("x", 0.1 + 0.2 + 0.6, parts={"a": 0.5, "b": 0.1})
    assert "a +0.5 s, b +0.1 s, unexplained 0 s" in capsys.readouterr().out


def test_parts_that_cancel_are_still_named(capsys):
    predict("x", 5, "s")
    measured("x", 5, parts={"slower": 1, "faster": -1})
    assert capsys.readouterr().out.endswith("residual 0 s (+0.0 %): slower +1 s, faster -1 s, unexplained 0 s\n")


def test_negative_and_zero_predictions(capsys):
    predict("change of loss", -2.0, "")
    assert measured("change of loss", -1.0).percent == 50
    predict("unused parameters", 0, "")
    assert measured("unused parameters", 3).percent is None
    assert capsys.readouterr().out.endswith("residual +3 (no percentage of a predicted 0): unexplained +3\n")


@pytest.mark.parametrize(
    ("said", "unit", "value", "other", "wanted"),
    [
        (1, "GiB", 2**30, "bytes", 1),
        (1, "GB", 1, "GiB", 1.073741824),
        (3, "MiB", 3072, "KiB", 3),
        (3, "MB", 3000, "KB", 3),
        (2, "s", 1500, "ms", 1.5),
        (20, "ms", 0.03, "s", 30),
        (90, "%", 80, "%", 80),
        (10, "tokens/s", 12, "tokens/s", 12),
        (10, "steps", 12, "steps", 12),
        (1, "GB/s", 500, "MB/s", 0.5),
        (7, "", 8, "", 8),
        (7, "", 8, None, 8),
    ],
)
def test_units_of_one_kind_are_converted(said, unit, value, other, wanted):
    predict("x", said, unit)
    entry = measured("x", value, other)
    assert entry.measured == pytest.approx(wanted, rel=1e-12) and entry.unit == unit


@pytest.mark.parametrize("unit", ["G", "M", "k", "g", "T "])
def test_a_bare_letter_is_refused_with_both_readings(unit):
    letter = unit.strip().upper()
    with pytest.raises(ValueError, match=f"{letter}B .*{letter}iB"):
        predict("x", 1, unit)
    predict("x", 1, "GiB")
    with pytest.raises(ValueError, match=f"{letter}iB"):
        measured("x", 1, unit)


@pytest.mark.parametrize(
    ("unit", "near"),
    [("gib", "GiB"), ("byte", "bytes"), ("token/s", "tokens/s"), ("sec", "s"), ("Mib", "MiB"), ("step", "steps")],
)
def test_an_unknown_unit_gets_the_nearest(unit, near):
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        predict("x", 1, unit)
    assert entries() == [] and progress.load().ledger == {}


@pytest.mark.parametrize("unit", [None, 3, "parsecs of cheese", ["GiB"]])
def test_no_unit_at_all(unit):
    with pytest.raises(ValueError, match="no unit"):
        predict("x", 1, unit)


@pytest.mark.parametrize(("unit", "other"), [("GiB", "s"), ("%", ""), ("GB", "GB/s"), ("tokens", "tokens/s")])
def test_units_of_different_kinds_are_refused(unit, other):
    predict("x", 1, unit)
    with pytest.raises(ValueError, match="one kind"):
        measured("x", 1, other)
    assert entries()[0].measured is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.9", ..., True, [1, 2], 1j, 10**400])
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="prediction of 'x' .*finite number; None skips"):
        predict("x", value, "s")
    predict("x", 1, "s")
    with pytest.raises(ValueError, match="measurement of 'x' .*finite number$"):
        measured("x", value)
    with pytest.raises(ValueError, match="the part 'p'"):
        measured("x", 1, parts={"p": value})


def test_anything_that_is_one_number_is_taken():
    import numpy as np

    predict("x", Decimal("1.5"), "s")
    assert measured("x", np.float32(2.5)).residual == 1.0


def test_measured_needs_its_prediction():
    predict("peak of a step", 1, "GiB")
    with pytest.raises(ValueError, match=r"did you mean 'peak of a step'.*predict\('peak of the step'"):
        measured("peak of the step", 1)


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_a_prediction_has_a_name(name):
    with pytest.raises(ValueError, match="name"):
        predict(name, 1, "s")


def test_unexplained_is_not_a_part():
    predict("x", 1, "s")
    with pytest.raises(ValueError, match="unexplained"):
        measured("x", 2, parts={"unexplained": 1})


def test_none_skips_the_prediction_and_the_lesson_goes_on(capsys):
    predict("x", None, "s")
    entry = measured("x", 1500, "ms", parts={"start-up": 2})
    assert capsys.readouterr().out == "x: not predicted, measured 1.5 s\n"
    assert (entry.residual, entry.percent, entry.unexplained) == (None, None, None)


def test_both_lists_get_the_pair():
    predict("a", 1, "s", lesson="04_ddp")
    predict("b", 2, "s")  # the lesson of the prediction before
    predict("c", 3, "s", lesson="05_zero")
    measured("b", 5, stamp={"device": "a card", "ranks": 8})
    assert [entry.name for entry in entries()] == ["a", "b", "c"]
    assert [entry.name for entry in entries("04_ddp")] == ["a", "b"]
    kept = progress.load().ledger
    assert list(kept) == ["04_ddp", "05_zero"] and list(kept["04_ddp"]) == ["a", "b"]
    assert (kept["04_ddp"]["b"].measured, kept["04_ddp"]["b"].stamp["ranks"]) == (5, 8)
    assert kept["04_ddp"]["a"].measured is None


def test_running_the_cells_again_replaces_the_pair():
    for guess in (1, 2):
        entry = predict("a", guess, "s", lesson="04_ddp")
        assert measured("a", 3) is entry
    assert [(entry.predicted, entry.measured) for entry in entries()] == [(2, 3)]
    assert progress.load().ledger["04_ddp"]["a"].predicted == 2


def test_the_lesson_is_the_notebooks_when_nobody_says(monkeypatch):
    assert predict("a", 1, "s").lesson == "scratch"
    monkeypatch.setattr(ledger, "_entries", {})
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/lessons/03_collectives.ipynb")
    assert predict("a", 1, "s").lesson == "03_collectives"


def test_the_stamp_says_where_and_when():
    here = stamp(ranks=4, backend="gloo")
    assert set(here) == {"device", "ranks", "backend", "torch", "python", "date"}
    assert (here["ranks"], here["backend"]) == (4, "gloo") and here["device"].endswith("cores")
    assert here["python"] == ".".join(map(str, sys.version_info[:3]))
    assert stamp(device="8 x a card")["device"] == "8 x a card"


def test_the_stamp_names_the_gpu_by_the_drivers_list(monkeypatch):
    monkeypatch.setattr(ledger, "_gpu_names", lambda: ["NVIDIA X", "NVIDIA X"])
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    sys.modules["torch"].__version__ = "2.13.0+cu130"
    assert stamp()["device"] == "NVIDIA X" and stamp(backend="nccl")["device"] == "NVIDIA X"
    assert stamp(backend="gloo")["device"].endswith("cores")
    sys.modules["torch"].__version__ = "2.13.0+cpu"
    assert stamp()["device"].endswith("cores")


def test_hidden_gpus_are_not_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ledger._gpu_names() == []


def test_the_stamp_starts_no_cuda_and_imports_no_torch():
    code = "import sys; from course_lib.notebook.ledger import stamp; stamp(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


def test_measured_takes_the_stamp_of_here_by_itself():
    predict("x", 1, "s")
    assert measured("x", 1).stamp == stamp()
