"""Figures: a small picture that is not blank, a text that says the same, and kinds that a grey print keeps apart."""

from __future__ import annotations

import base64
import io
import itertools
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from course_lib import figures
from course_lib.figures import style
from course_lib.figures import training as drawn_by
from course_lib.figures.stored_figures import pictures
from course_lib.notebook.ledger import Entry
from course_lib.observe import Span


def step(late: float = 0.0) -> list[Span]:
    """One DDP step of 50 ms in which the all-reduces travel under the backward pass, and something else runs."""
    stretches = [
        ("forward", 0, 10, 1), ("backward", 10, 30, 1), ("collective", 15, 25, 2), ("collective", 25, 40, 2),
        ("optimizer", 40, 45, 1), ("other", 45, 50, 1),
    ]  # fmt: skip
    return [Span(kind, kind, 100 + late + a / 1e3, 100 + late + b / 1e3, thread) for kind, a, b, thread in stretches]


ENTRIES = [
    Entry("peak of a step", "04", "GiB", 1.9, 2.05, {"buckets": 0.1, "fragments": 0.02}),
    Entry("bytes a rank sends", "04", "bytes", 3215872.0, 3217000.0),
    Entry("not measured yet", "04", "s", 3.0),
    Entry("not predicted", "04", "s", None, 3.0),
]
NINE = {f"run {i}": [5.0 - i / 10, 4.0] for i in range(9)}
PICTURES = {
    "losses": lambda: figures.losses({"one rank": [5.6, 5.1, 4.7], "DDP": [5.6, 5.1, 4.7]}),
    "losses of nine": lambda: figures.losses(NINE),
    "timeline": lambda: figures.timeline([step(), step(0.001)], title="One DDP step"),
    "timeline of one": lambda: figures.timeline([step()], title="One DDP step"),
    "timeline of four": lambda: figures.timeline([step()] * 4, title="One DDP step"),
    "throughput": lambda: figures.throughput([1, 2, 4], [1000, 1800, 2500.0], title="Here", notes={"model": [1, 2, 3]}),
    "throughput of nine": lambda: figures.throughput([1], [1.0], title="Here", notes=dict.fromkeys("abcdefgh", [2])),
    "bars": lambda: figures.bars({"fp32": 5767168, "bf16": 2883584}, ylabel="gradients (bytes)", title="Gradients"),
    "ledger": lambda: figures.ledger(ENTRIES),
    "ledger of many parts": lambda: figures.ledger([Entry("x", "04", "s", 1.0, 9.0, dict.fromkeys("abcdefgh", 1.0))]),
}


@pytest.fixture
def axes_of(monkeypatch):
    """What was drawn: the axes of each figure that is turned into a picture."""
    seen = []

    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **kw: (seen.append(figure), real(figure, file, **kw)))
    return lambda: seen[-1].axes[0]


@pytest.mark.parametrize("name", PICTURES)
def test_a_small_picture_with_its_text(name, recwarn):
    picture = PICTURES[name]()
    bundle = picture._repr_mimebundle_()
    [(stored, alt)] = pictures({"data": bundle})
    png = base64.b64decode(stored)
    assert len(png) < 80_000
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("L"), dtype=float)
    assert pixels.shape[1] > 600 and pixels.std() > 10 and (pixels < 128).mean() > 0.003  # ink on it
    assert len(alt) > 30 and alt.endswith(".")
    assert bundle["text/plain"] == f"Figure: {alt}" == repr(picture)
    assert not [str(w.message) for w in recwarn]  # nothing left out, nothing squeezed


def test_the_texts_carry_the_numbers():
    told = {name: repr(make()) for name, make in PICTURES.items()}
    assert "one rank from 5.600 to 4.700; DDP from 5.600 to 4.700" in told["losses"]
    assert "timeline of 2 ranks over 51 ms; rank 0 runs 2 collectives" in told["timeline"]
    assert "timeline of 1 rank over 50 ms; rank 0 runs 2 collectives" in told["timeline of one"]
    assert "measured 1 rank 1,000, 2 ranks 1,800, 4 ranks 2,500" in told["throughput"]
    assert "gradients (bytes): fp32 5,767,168, bf16 2,883,584" in told["bars"]
    assert "peak of a step: predicted 1.9 GiB, measured 2.05 GiB" in told["ledger"]
    assert "not measured yet" not in told["ledger"] and "not predicted" not in told["ledger"]


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("losses", "optimizer step", "loss (nats a byte)"),
        ("timeline", "time (ms)", ""),
        ("throughput", "ranks", "tokens per second"),
        ("bars", "", "gradients (bytes)"),
        ("ledger", "percent of predicted", ""),
    ],
)
def test_axes_say_what_and_in_which_unit(name, x, y, axes_of):
    PICTURES[name]()
    axis = axes_of()
    assert (axis.get_xlabel(), axis.get_ylabel()) == (x, y) and axis.get_title()


def test_a_timeline_draws_each_rank_s_collectives_below_its_computation(axes_of):
    PICTURES["timeline"]()
    axis = axes_of()
    colour, hatch = drawn_by.KINDS["collective"]
    bars = [(c.get_facecolor()[0], c.get_hatch(), c.get_paths()[0].get_extents()) for c in axis.collections]
    assert len(bars) == 2 * 5  # "other" is not drawn
    wire = [box for face, h, box in bars if np.allclose(face[:3], to_rgb(colour)) and h == hatch]
    assert [(round(box.x0), round(box.x1)) for box in wire] == [(15, 25), (25, 40), (16, 26), (26, 41)]
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["rank 0 computes", "rank 0 all-reduces", "rank 1 computes", "rank 1 all-reduces"]
    for name, at in zip(names, axis.get_yticks(), strict=True):
        here = [box for _, _, box in bars if box.y0 < at < box.y1]
        assert len(here) == (3 if "computes" in name else 2)
        assert all(box in wire for box in here) == ("all-reduces" in name)
    legend = [text.get_text() for text in axis.figure.legends[0].get_texts()]
    assert legend == ["forward", "backward", "optimizer", "collective"]


def test_a_legend_below_covers_nothing(axes_of):
    for name in ("timeline of one", "timeline", "timeline of four", "ledger", "ledger of many parts"):
        PICTURES[name]()
        axis = axes_of()
        legend = axis.figure.legends[0].get_window_extent()
        assert legend.y1 < axis.xaxis.label.get_window_extent().y0 and legend.y0 >= 0


def lightness(colour: str) -> float:
    """CIE L*, 0 black to 100 white: equal steps look equal, and a grey print keeps it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = float(np.dot([0.2126, 0.7152, 0.0722], linear))
    return 116 * luminance ** (1 / 3) - 16


def test_a_grey_print_keeps_the_kinds_of_a_timeline_apart():
    assert lightness("#FFFFFF") == pytest.approx(100, abs=0.1) and lightness("#777777") == pytest.approx(50, abs=1)
    for (one, (colour, hatch)), (other, (colour2, hatch2)) in itertools.combinations(drawn_by.KINDS.items(), 2):
        assert hatch != hatch2 or abs(lightness(colour) - lightness(colour2)) > 15, f"{one} and {other} look alike"
    assert all(lightness(colour) < 80 for colour, _ in drawn_by.KINDS.values())  # and from the page


@pytest.mark.parametrize("name", ["losses", "throughput", "losses of nine"])
def test_lines_differ_in_more_than_colour(name, axes_of):
    PICTURES[name]()
    lines = axes_of().get_lines()
    assert len({line.get_marker() for line in lines}) == min(len(lines), 7)  # lines that coincide show nothing else


def test_bars_differ_in_more_than_colour(axes_of):
    figures.bars(dict.fromkeys("abcdef", 1), ylabel="s", title="Six")
    assert len({bar.get_hatch() for bar in axes_of().patches}) == 6


def test_a_bar_carries_its_number(axes_of):
    PICTURES["bars"]()
    assert [text.get_text() for text in axes_of().texts] == ["5,767,168", "2,883,584"]


def test_a_ledger_draws_each_residual_part_by_part(axes_of):
    loss = Entry("change of loss", "04", "", -2.0, -1.0, {"warm-up": 0.5, "other data": -0.25})
    figures.ledger([*ENTRIES, loss])
    both, residual = axes_of().figure.axes
    assert (residual.get_xlabel(), bool(residual.get_title())) == ("residual, percent of predicted", True)
    names = [label.get_text() for label in both.get_yticklabels()]
    assert names == ["peak of a step\n1.9 to 2.05 GiB", "bytes a rank sends\n3,215,872 to 3,217,000 bytes",
                     "change of loss\n-2 to -1"]  # fmt: skip

    def bars(axis):
        stretches: dict[str, list] = {}
        for name, at in zip(names, both.get_yticks(), strict=True):
            here = [b for b in axis.patches if b.get_y() < at < b.get_y() + b.get_height()]
            stretches[name.split("\n")[0]] = [(round(b.get_x(), 2), round(b.get_width(), 2)) for b in here]
        return stretches

    assert bars(both) == {
        "peak of a step": [(0, 100), (0, 107.89)],
        "bytes a rank sends": [(0, 100), (0, 100.04)],
        "change of loss": [(0, 100), (0, 50)],
    }
    assert bars(residual) == {
        "peak of a step": [(0, 5.26), (5.26, 1.05), (6.32, 1.58)],
        "bytes a rank sends": [(0, 0.04)],
        "change of loss": [(0, 25), (0, -12.5), (25, 37.5)],
    }
    assert [text.get_text().strip() for text in residual.texts] == ["+7.89 %", "+0.04 %", "+50.00 %"]
    legend = [text.get_text() for text in both.figure.legends[0].get_texts()]
    assert sorted(legend) == sorted(
        ["predicted", "measured", "buckets", "fragments", "warm-up", "other data", "unexplained"]
    )
    assert len({b.get_hatch() for b in residual.patches}) == 5  # four parts, and the rest without one


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: figures.losses({}), "no loss to draw: give at least one step"),
        (lambda: figures.losses({"a": [1.0], "b": []}), "no loss to draw for 'b'"),
        (lambda: figures.timeline([], title="x"), "nothing to draw: give for each rank spans of forward, backward"),
        (lambda: figures.timeline([[], []], title="x"), "nothing to draw"),
        (lambda: figures.timeline([[s for s in step() if s.kind == "other"]], title="x"), "nothing to draw"),
        (lambda: figures.throughput([], [], title="x"), r"ranks=\[\]: give the numbers of ranks"),
        (lambda: figures.throughput([0, 1], [1, 1], title="x"), r"ranks=\[0, 1\].*each 1 or more"),
        (lambda: figures.throughput([1, 2], [1.0], title="x"), "'measured' has 1 values for 2 numbers of ranks"),
        (lambda: figures.throughput([1], [1.0], title="x", notes={"m": []}), "'m' has 0 values for 1 numbers"),
        (lambda: figures.bars({}, ylabel="s", title="x"), "no bar to draw: give at least one name and value"),
        (lambda: figures.ledger([]), "no measured prediction yet: run a cell"),
        (lambda: figures.ledger(ENTRIES[2:]), "no measured prediction yet"),
        (lambda: style.picture(style.new_figure()[0], "  "), "needs its alternative text"),
    ],
)
def test_nothing_to_draw_is_said(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()


def test_a_rank_without_spans_keeps_its_place(axes_of):
    figures.timeline([step(), []], title="Rank 1 was not traced")
    assert len(axes_of().get_yticks()) == 4 and len(axes_of().collections) == 5


def test_any_object_with_kind_start_and_end_is_a_span():
    spans = [SimpleNamespace(kind="collective", start=1.0, end=1.01)]
    assert "over 10 ms; rank 0 runs 1 collectives" in repr(figures.timeline([spans], title="x"))


def test_pyplot_is_left_alone():
    """Neither its list of figures nor its settings change; where a notebook has not imported it, it stays out."""
    code = """
import sys
from test_figures import PICTURES
kinds = [PICTURES[name] for name in ("losses", "timeline", "throughput", "bars", "ledger")]
for draw in kinds:
    draw()
assert "matplotlib.pyplot" not in sys.modules, "pyplot came in"
import matplotlib.pyplot as plt
mine = plt.figure()
before = dict(plt.rcParams)
for draw in kinds:
    draw()
assert plt.get_fignums() == [1] and plt.gcf() is mine and not mine.axes, "pyplot's figures changed"
assert dict(plt.rcParams) == before, "settings changed"
"""
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "MPLBACKEND": "agg", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (5767168, "5.50 MiB"),
        (-5767168, "-5.50 MiB"),
        (2**30, "1.00 GiB"),
        (80 * 2**30, "80.00 GiB"),
    ],
)
def test_bytes_in_words(value, said):
    assert figures.nice_bytes(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (np.int64(5767168), "5,767,168"),
        (1.5, "1.5"),
        (0.000012345, "1.234e-05"),
        (999.96, "1000"),
        (123456.7, "123,457"),
        (-2048.0, "-2,048"),
        (np.float32(0.1), "0.1"),
        (float("nan"), "nan"),
        (10**20, "100,000,000,000,000,000,000"),
    ],
)
def test_numbers_for_the_page(value, said):
    assert style.nice_number(value) == said
