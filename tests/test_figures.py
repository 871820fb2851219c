"""Figures: small pictures that are not blank, with texts that say the same, and kinds that a grey print keeps apart."""

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
from matplotlib.patches import Polygon
from PIL import Image

from course_lib import figures
from course_lib.figures import collectives, frameworks, fsdp, grid, pipeline, sharding, single_gpu, splits, style
from course_lib.figures import training as drawn_by
from course_lib.figures.ranks import side_by_side
from course_lib.figures.stored_figures import pictures
from course_lib.launch import launch
from course_lib.memory import estimate
from course_lib.memory.allocator import replay
from course_lib.notebook.ledger import Entry
from course_lib.observe import Span
from course_lib.observe.tracking import Tracker
from course_lib.parallel.grid import Grid
from course_lib.parallel.schedules import orders
from course_lib.parallel.simulate import simulate
from course_lib.units import MIB, nice_bytes, nice_number


def ddp_step(late: float = 0.0) -> list[Span]:
    """One DDP step of 50 ms in which the all-reduces travel under the backward pass, and something else runs."""
    main = [("forward", 0, 10, 1), ("backward", 10, 30, 1), ("optimizer", 40, 45, 1), ("other", 45, 50, 1)]
    stretches = main[:2] + [("collective", 15, 25, 2), ("collective", 25, 40, 2)] + main[2:]
    return [Span(kind, kind, 100 + late + a / 1e3, 100 + late + b / 1e3, thread) for kind, a, b, thread in stretches]


ENTRIES = [
    Entry("peak of a step", "04", "GiB", 1.9, 2.05, {"buckets": 0.1, "fragments": 0.02}),
    Entry("bytes a rank sends", "04", "bytes", 3215872.0, 3217000.0),
    Entry("not measured yet", "04", "s", 3.0),
    Entry("not predicted", "04", "s", None, 3.0),
]
NINE = {f"run {i}": [5.0 - i / 10, 4.0] for i in range(9)}
CURVE = [(0, 10 * MIB), (10**9, 40 * MIB), (2 * 10**9, 15 * MIB)]
PHASES = {"forward": (0, 10**9), "backward": (10**9, 2 * 10**9)}
NEED = estimate("tiny", precision="fp32")
HALF_USED = replay([(True, 0, 20 * MIB), (True, 1, 20 * MIB), (False, 0, 0)])
SPANS = [
    Span("forward", "forward", 0.0, 1.0, 7),
    Span("FSDP::pre_forward (model.layers.0)", "other", 1.0, 1.4, 7),
    Span("FSDP::all_gather (model.layers.0)", "other", 1.1, 1.3, 7),
    Span("FSDP::pre_forward (model.layers.1)", "other", 2.0, 2.1, 7),
    Span("FSDP::post_backward_reduce", "other", 3.0, 3.3, 7),
    Span("gloo:all_gather", "collective", 1.1, 1.3, 8),
    Span("forward", "forward", 1.1, 1.2, 8),
]
HELD = [
    {"name": "DDP", "measured": {"parameters": 3 * MIB, "gradients": 3 * MIB, "peak": 99 * MIB}, "predicted": 6 * MIB},
    {"name": "ZeRO-3", "predicted": {"parameters": MIB, "master": MIB, "total": 2 * MIB, "padding": 5}},
]
SENT = [
    {"name": "FSDP2", "counted": {"all_gather": 2 * MIB, "reduce_scatter": MIB}, "formula": 4 * MIB},
    {"name": "DDP", "counted": 3 * MIB},
]
SLICES = {
    "DDP": [{"elements": 8, **dict.fromkeys(sharding.HELD, [(0, 8)])}] * 2,
    "FSDP2": [{"elements": 8, **dict.fromkeys(sharding.HELD, [(4 * rank, 4 * rank + 4)])} for rank in (0, 1)],
}
ROW = {"technique": "full", "weights": MIB, "gradients": MIB, "optimizer": 2 * MIB, "activations": MIB, "peak": 5 * MIB}
STATE = np.abs(np.random.default_rng(0).normal(size=512)) * 1e-6
STATE[300] = 1e-2
FRAMEWORKS = [
    {"name": "DDP", "ranks": 2, "held": 3 * MIB, "sent": None, "seconds": 0.25},
    {"name": "one rank", "ranks": 1, "held": MIB, "sent": 0, "seconds": 0.5},
]


def schedule_of(schedule, stages=2, micro_batches=4, chunks=1, **times):
    return simulate(orders(schedule, stages, micro_batches, chunks), **times)


def logged(ranks):
    metrics = ("loss", "tokens_per_second", "memory_bytes", "gradient_norm", "heartbeat_gap")
    series = [[(step, (rank + 1) * 2.0**30 / (step + 1), 0.0) for step in range(9)] for rank in range(ranks)]
    return {rank: dict.fromkeys(metrics, series[rank]) for rank in range(ranks)}


PICTURES = {  # name -> how it is drawn, and what its text says
    "losses": (
        lambda: figures.losses({"one rank": [5.6, 5.1, 4.7], "DDP": [5.6, 5.1, 4.7]}),
        ["one rank from 5.600 to 4.700; DDP from 5.600 to 4.700"],
    ),
    "losses of nine": (lambda: figures.losses(NINE), ["run 8 from 4.200"]),
    "timeline": (
        lambda: figures.timeline([ddp_step(), ddp_step(0.001)], title="One DDP step"),
        ["timeline of 2 ranks over 51 ms; rank 0 runs 2 collectives"],
    ),
    "timeline of one": (
        lambda: figures.timeline([ddp_step()], title="One DDP step"),
        ["timeline of 1 rank over 50 ms; rank 0 runs 2 collectives"],
    ),
    "timeline of four": (lambda: figures.timeline([ddp_step()] * 4, title="One DDP step"), ["4 ranks"]),
    "throughput": (
        lambda: figures.throughput([1, 2, 4], [1000, 1800, 2500.0], title="Here", notes={"model": [1, 2, 3]}),
        ["measured 1 rank 1,000, 2 ranks 1,800, 4 ranks 2,500"],
    ),
    "throughput of nine": (
        lambda: figures.throughput([1], [1.0], title="Here", notes=dict.fromkeys("abcdefgh", [2])),
        ["1 rank 1"],
    ),
    "bars": (
        lambda: figures.bars({"fp32": 5767168, "bf16": 2883584}, ylabel="gradients (bytes)", title="Gradients"),
        ["gradients (bytes): fp32 5,767,168, bf16 2,883,584"],
    ),
    "ledger": (lambda: figures.ledger(ENTRIES), ["peak of a step: predicted 1.9 GiB, measured 2.05 GiB"]),
    "ledger of many parts": (
        lambda: figures.ledger([Entry("x", "04", "s", 1.0, 9.0, dict.fromkeys("abcdefgh", 1.0))]),
        ["predicted 1 s, measured 9 s"],
    ),
    "memory over time": (
        lambda: figures.memory_over_time(CURVE, floors={"weights": 10 * MIB}, phases=PHASES),
        ["peak 40 MiB at 1.00 s", "weights 10.00 MiB"],
    ),
    "against a card": (
        lambda: figures.against_card({"tiny": NEED}, card=2**30, card_name="a card", title="Fits?"),
        [NEED.peak_phase, "a card of 1.0 GiB"],
    ),
    "reserved": (
        lambda: figures.reserved_and_allocated(
            replay([(True, 0, 3 * MIB), (False, 0, 0)]).timeline, title="T", note="N"
        ),
        ["(N): at most 3 MiB allocated, 20 MiB reserved"],
    ),
    "segments": (
        lambda: figures.segments({"now": HALF_USED.segments}, title="Segments", note="simulated"),
        ["20 MiB in use", "20 MiB free", "simulated"],
    ),
    "techniques": (
        lambda: single_gpu.memory_by_technique([ROW, ROW | {"technique": "lora", "predicted": MIB}]),
        ["lora 5 MiB"],
    ),
    "gradients": (
        lambda: single_gpu.gradient_window({"plain": [2.0**-30, 1.0, 0.0], "scaled": [2.0**-14, 2.0**16]}),
        ["plain: 50.0 % below fp16's smallest number; scaled: 0.0 %"],
    ),
    "8-bit state": (
        lambda: single_gpu.blockwise_state(STATE, {"flat": STATE * (STATE > 1e-4)}, block=256, title="A state"),
        [f"flat: {100 * 511 / 512:.1f} % became 0"],
    ),
    "levels": (
        lambda: single_gpu.four_bit_levels(np.linspace(-1, 1, 64), {"even": np.linspace(-1, 1, 16)}),
        ["-1.00, -0.87"],
    ),
    "learning": (
        lambda: single_gpu.learning({"lora": [3, 2]}, {"lora": (3, 1.5)}, title="T"),
        ["lora from 3.00 to 1.50"],
    ),
    **{
        kind: (lambda kind=kind: collectives.before_and_after([kind]), [f"{kind}: rank 0 has"])
        for kind in collectives.KINDS
    },
    "ring step": (lambda: collectives.ring_step(4, 6), ["16 of 16 chunks hold the whole sum"]),
    "ring steps": (lambda: collectives.ring_steps(4), ["after step 3 4 of 16", "after step 6 16 of 16"]),
    "by ranks": (
        lambda: collectives.by_ranks({"ring": {2: 1, 4: 1.5}}, {"ring": {2: 1, 4: 1.5}}, unit="messages", title="Sent"),
        ["ring from 1 at 2 ranks to 1.5 at 4"],
    ),
    "links": (lambda: collectives.seconds_by_link({"slow": 1.0, "fast": 0.1}, title="1 GB"), ["slow 1e+03 ms"]),
    "held bytes": (
        lambda: sharding.bytes_by_stage(HELD, note="2 ranks"),
        ["DDP: measured 6.00 MiB, predicted 6.00 MiB", "ZeRO-3: predicted 2.00 MiB", "2 ranks"],
    ),
    "traffic": (
        lambda: sharding.traffic(SENT, note="counted by the system"),
        ["FSDP2: counted 3.00 MiB, formula 4.00 MiB; DDP: counted 3.00 MiB"],
    ),
    "who holds what": (
        lambda: sharding.who_holds_what(SLICES),
        ["DDP: parameters 100%, gradients 100%", "FSDP2: parameters 50%, gradients 50%, optimizer 50%"],
    ),
    "units": (
        lambda: fsdp.memory_by_unit({"yours": CURVE}, units=[("0", 5, 10**9)], lines={"predicted": 2 * MIB}, title="T"),
        ["yours peaks at 40.00 MiB", "predicted is 2.00 MiB"],
    ),
    "two curves": (lambda: fsdp.memory_by_unit({"a": CURVE, "b": CURVE}, title="Two"), ["a peaks", "b peaks"]),
    "trace": (lambda: fsdp.step_trace({"as it is": SPANS}, title="A step"), ["800 ms"]),
    "mesh": (
        lambda: fsdp.mesh(2, 3, inside="weights", between="gradients", title="A mesh"),
        ["2 machines with 3 ranks", "row: weights", "column: gradients"],
    ),
    "ranks": (
        lambda: side_by_side(logged(3) | {3: {"loss": [(0, 2.5, 0.0)]}}, title="Four ranks"),
        [
            "memory (GiB): rank 0 0.1111, rank 1 0.2222, rank 2 0.3333, rank 3 nothing",
            "rank 3 2.5",
            "heartbeat gap (s)",
        ],
    ),
    "frameworks": (
        lambda: frameworks.compare(FRAMEWORKS, title="Side by side"),
        ["DDP  (2 ranks): held 3.00 MiB, sent not measured, seconds 250 ms; one rank  (1 rank): held 1.00 MiB"],
    ),
    "columns and rows": (
        splits.column_then_row,
        ["at f: forward nothing, backward all-reduce", "at g: forward all-reduce, backward nothing"],
    ),
    "heads": (
        lambda: splits.heads_over_ranks(heads=16, kv_heads=4, ranks=4),
        ["4 of 16 query heads read each of 4 kv heads. Each of 4 ranks holds 4 query heads"],
    ),
    "vocabulary": (  # 1,024 x 4,096 / 4 logits of 4 bytes; 1,024 numbers
        lambda: splits.vocabulary_loss(tokens=1024, vocab=4096, ranks=4),
        ["4.00 MiB on each", "each 4.00 KiB"],
    ),
    "inside or between": (
        lambda: splits.inside_or_between(layers=6, ranks=3),
        ["each rank holds 2 whole layers", "2 times in all"],
    ),
    "schedule": (
        lambda: pipeline.schedule(
            schedule_of("interleaved", 2, 2, 2), schedule_of("interleaved", 2, 2, 2), title="Two chunks"
        ),
        ["2 ranks, 2 micro-batches"],
    ),
    "schedules": (
        lambda: pipeline.schedules(
            {name: (schedule_of(name, send=0.1), schedule_of(name)) for name in ("naive", "gpipe")}, title="All"
        ),
        [f"naive idles {schedule_of('naive', send=0.1).bubble:.1%} in the real run and 50.0% in the ideal"],
    ),
    "grid": (
        lambda: grid.rank_grid(Grid(dp=2, pp=2, tp=2), axis="pp", per_node=4),
        ["8 ranks, pp=2 x dp=2 x tp=2, on 2 machines of 4", "A: ranks 0, 4; B: ranks 1, 5", "inside a machine."],
    ),
    "grid of one": (lambda: grid.rank_grid(Grid()), ["A grid of one rank, on 1 machine of 8"]),
    "ring attention": (
        lambda: grid.ring_steps(4),
        [
            "contiguous: rank 0 0.5, rank 1 1.5, rank 2 2.5, rank 3 3.5 squares",
            "zigzag: rank 0 2, rank 1 2, rank 2 2, rank 3 2 squares",
        ],
    ),
}


def draw(name):
    return PICTURES[name][0]()


@pytest.fixture
def axes_of(monkeypatch):
    """What was drawn: the axes of each figure that is turned into a picture."""
    seen = []

    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **kw: (seen.append(figure), real(figure, file, **kw)))
    return lambda: seen[-1].axes[0]


def has_title(figure):
    titles = [axis.get_title(loc=place) for axis in figure.axes for place in ("center", "left")]
    return any(titles) or figure.get_suptitle()


@pytest.mark.parametrize("name", PICTURES)
def test_a_small_picture_with_its_title_and_its_text(name, axes_of, recwarn):
    drawn = draw(name)
    bundle = drawn._repr_mimebundle_()
    [(stored, alt)] = pictures({"data": bundle})
    png = base64.b64decode(stored)
    assert len(png) < 80_000
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("L"), dtype=float)
    assert pixels.shape[1] > 600 and pixels.std() > 10 and (pixels < 128).mean() > 0.003  # ink on it
    assert len(alt) > 30 and alt.endswith(".") and bundle["text/plain"] == f"Figure: {alt}" == repr(drawn)
    assert [words for words in PICTURES[name][1] if words not in alt] == []
    assert has_title(axes_of().figure)
    assert not [str(w.message) for w in recwarn]  # nothing left out, nothing squeezed


def test_the_ledger_leaves_out_what_has_no_pair():
    assert "not measured yet" not in repr(draw("ledger")) and "not predicted" not in repr(draw("ledger"))


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("losses", "optimizer step", "loss (nats per byte)"),
        ("timeline", "time (ms)", ""),
        ("throughput", "ranks", "tokens per second"),
        ("bars", "", "gradients (bytes)"),
        ("ledger", "percent of predicted", ""),
    ],
)
def test_axes_say_what_and_in_which_unit(name, x, y, axes_of):
    draw(name)
    axis = axes_of()
    assert (axis.get_xlabel(), axis.get_ylabel()) == (x, y) and axis.get_title()


def test_a_timeline_draws_each_rank_s_collectives_below_its_computation(axes_of):
    draw("timeline")
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
        draw(name)
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
    draw(name)
    lines = axes_of().get_lines()
    assert len({line.get_marker() for line in lines}) == min(len(lines), 7)  # lines that coincide show nothing else


def test_bars_differ_in_more_than_colour(axes_of):
    figures.bars(dict.fromkeys("abcdef", 1), ylabel="s", title="Six")
    assert len({bar.get_hatch() for bar in axes_of().patches}) == 6


def test_a_bar_carries_its_number(axes_of):
    draw("bars")
    assert [text.get_text() for text in axes_of().texts] == ["5,767,168", "2,883,584"]


def test_a_ledger_draws_each_residual_part_by_part(axes_of):
    loss = Entry("change of loss", "04", "", -2.0, -1.0, {"warm-up": 0.5, "other data": -0.25})
    figures.ledger([*ENTRIES, loss])
    both, residual = axes_of().figure.axes
    assert (residual.get_xlabel(), bool(residual.get_title())) == ("residual, percent of predicted", True)
    names = [label.get_text() for label in both.get_yticklabels()]
    assert names == [
        "peak of a step\n1.9 to 2.05 GiB",
        "bytes a rank sends\n3,215,872 to 3,217,000 bytes",
        "change of loss\n-2 to -1",
    ]

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
    ("make", "said"),
    [
        (lambda: figures.losses({}), "no loss to draw: give at least one step"),
        (lambda: figures.losses({"a": [1.0], "b": []}), "no loss to draw for 'b'"),
        (lambda: figures.timeline([], title="x"), "nothing to draw: give for each rank spans of forward, backward"),
        (lambda: figures.timeline([[], []], title="x"), "nothing to draw"),
        (lambda: figures.timeline([[s for s in ddp_step() if s.kind == "other"]], title="x"), "nothing to draw"),
        (lambda: figures.throughput([], [], title="x"), r"ranks=\[\]: give the numbers of ranks"),
        (lambda: figures.throughput([0, 1], [1, 1], title="x"), r"ranks=\[0, 1\].*each 1 or more"),
        (lambda: figures.throughput([1, 2], [1.0], title="x"), "'measured' has 1 values for 2 numbers of ranks"),
        (lambda: figures.throughput([1], [1.0], title="x", notes={"m": []}), "'m' has 0 values for 1 numbers"),
        (lambda: figures.bars({}, ylabel="s", title="x"), "no bar to draw: give at least one name and value"),
        (lambda: figures.ledger([]), "no measured prediction yet: run a cell"),
        (lambda: figures.ledger(ENTRIES[2:]), "no measured prediction yet"),
        (lambda: style.picture(style.new_figure()[0], "  "), "needs its alternative text"),
        (lambda: figures.memory_over_time([(0, 0)], floors={}, phases={}), "nothing to draw"),
        (lambda: figures.against_card({}, card=1, card_name="c", title="t"), "nothing to draw"),
        (lambda: figures.reserved_and_allocated([], title="t", note="n"), "nothing to draw"),
        (lambda: figures.segments({}, title="t", note="n"), "nothing to draw"),
        (lambda: single_gpu.memory_by_technique([]), "nothing to draw"),
        (lambda: single_gpu.gradient_window({}), "nothing to draw"),
        (lambda: single_gpu.gradient_window({"zeros": [0.0]}), "'zeros' holds zeros alone"),
        (
            lambda: single_gpu.blockwise_state(STATE, {"short": STATE[:5]}, block=256, title="t"),
            "'short' has the shape",
        ),
        (lambda: single_gpu.learning({"a": [1]}, {}, title="T"), "of the same methods"),
        (lambda: collectives.before_and_after([]), "nothing to draw"),
        (lambda: collectives.before_and_after(["gossip"]), "there are pictures of broadcast"),
        (lambda: collectives.ring_state(4, 7), "step=7 of 4 ranks"),
        (lambda: collectives.ring_state(1, 0), "at least 2 ranks"),
        (lambda: collectives.by_ranks({}, {}, unit="u", title="t"), "nothing to draw"),
        (lambda: collectives.seconds_by_link({}, title="t"), "nothing to draw"),
        (lambda: sharding.bytes_by_stage([]), "nothing to draw"),
        (
            lambda: sharding.bytes_by_stage([*HELD, {"name": "ZeRO-9", "measured": {"peak": 5}}]),
            "'ZeRO-9' has no bytes",
        ),
        (lambda: sharding.traffic([]), "nothing to draw"),
        (lambda: sharding.who_holds_what({}), "nothing to draw"),
        (lambda: sharding.who_holds_what({"DDP": []}), "nothing to draw"),
        (lambda: fsdp.memory_by_unit({}, title="t"), "nothing to draw"),
        (lambda: fsdp.memory_by_unit({"one point": [(0, 1)]}, title="t"), "nothing to draw"),
        (lambda: fsdp.step_trace({"ddp": SPANS[:1]}, title="t"), "'ddp' has no stretch of FSDP2"),
        (lambda: fsdp.mesh(1, 4, inside="", between="", title="t"), "no hybrid mesh"),
        (lambda: side_by_side({}), "no rank logged any"),
        (lambda: side_by_side({0: {"other": [(1, 1.0, 0.0)]}}), "no rank logged any"),
        (lambda: side_by_side(logged(1), metrics=["speed"]), "speed: no rank logged it. Logged: gradient_norm"),
        (lambda: frameworks.compare([], title="t"), "nothing to draw"),
        (lambda: frameworks.compare([{"name": "a", "ranks": 1}], title="t"), "needs held, seconds, sent"),
        (lambda: splits.column_then_row(ranks=5), "ranks=5: give a whole number from 2 to 4"),
        (lambda: splits.heads_over_ranks(heads=8, kv_heads=2, ranks=4), "ranks the kv heads"),
        (lambda: splits.heads_over_ranks(heads=6, kv_heads=4), "kv heads must divide the heads"),
        (lambda: splits.vocabulary_loss(tokens=0), "tokens=0"),
        (lambda: splits.inside_or_between(layers=5, ranks=2), "layers=5 do not divide"),
        (
            lambda: pipeline.schedule(schedule_of("1f1b", 2), schedule_of("1f1b", 3), title="t"),
            "2 ranks and the ideal one 3",
        ),
        (lambda: pipeline.schedules({}, title="t"), "at least one schedule"),
        (lambda: grid.rank_grid(Grid(), axis="ep"), "axis='ep' is no choice"),
        (lambda: grid.rank_grid(Grid(), per_node=17), "per_node=17: choose from 1 to 16"),
        (lambda: grid.rank_grid(Grid(), per_node=0), "per_node=0"),
        (lambda: grid.ring_steps(9), "ranks=9: choose from 2 to 8"),
        (lambda: grid.ring_steps(2, layouts=[]), "at least one layout"),
        (lambda: grid.ring_steps(2, layouts=["stripes"]), "layout='stripes'"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_rank_without_spans_keeps_its_place(axes_of):
    figures.timeline([ddp_step(), []], title="Rank 1 was not traced")
    assert len(axes_of().get_yticks()) == 4 and len(axes_of().collections) == 5


def test_any_object_with_kind_start_and_end_is_a_span():
    spans = [SimpleNamespace(kind="collective", start=1.0, end=1.01)]
    assert "over 10 ms; rank 0 runs 1 collectives" in repr(figures.timeline([spans], title="x"))


def texts(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts] + [text.get_text() for text in figure.texts]


def test_bars_against_a_card_are_the_parts_of_the_estimate(axes_of):
    need = estimate("llama-3.1-8b")
    figures.against_card({"8B": need}, card=80 * 2**30, card_name="80", title="t")
    widths = [patch.get_width() * 2**30 for patch in axes_of().patches[:6]]
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    assert widths == pytest.approx([getattr(need, part) for part in parts])


def test_only_known_categories_are_stacked_and_predictions_are_outlined(axes_of):
    draw("held bytes")
    lengths = [round(bar.get_width(), 6) for bar in axes_of().patches]
    assert lengths == [3, 3, 6, 1, 1], "peak, total and padding are no parts of the stack"
    assert len([bar for bar in axes_of().patches if bar.get_facecolor()[3] == 0]) == 3
    draw("traffic")
    assert [round(bar.get_width(), 6) for bar in axes_of().patches] == [2, 1, 3]
    assert axes_of().lines[0].get_xdata()[0] == 4


def test_stretches_inside_others_do_not_count_twice():
    found = fsdp.waits(SPANS)
    assert list(found) == ["pre_forward", "post_backward_reduce"]
    assert found["pre_forward"] == pytest.approx(0.5) and found["post_backward_reduce"] == pytest.approx(0.3)


def test_a_folder_of_metrics_is_read_and_metrics_can_be_chosen(tmp_path):
    for rank in (0, 1):
        with Tracker(tmp_path, rank=rank, world_size=2) as tracker:
            tracker.log(1, loss=rank + 1.0, learning_rate=0.25)
            tracker.log(2, loss=float("nan"), learning_rate=0.5)
    assert "learning_rate: rank 0 0.5, rank 1 0.5." in side_by_side(tmp_path, metrics=["learning_rate"]).alt


def test_the_real_run_stands_above_the_ideal_one_with_both_bubbles(axes_of):
    real = schedule_of("1f1b", forward=0.01, backward=0.02, send=0.002)
    pipeline.schedule(real, schedule_of("1f1b", forward=0.5, backward=1.0), title="A run")
    above, below = axes_of().figure.axes
    assert f"real run: {real.bubble:.1%} idle" in above.get_title() and below.get_title() == "ideal: 20.0% idle"
    assert below.get_xlim()[1] == pytest.approx(15, rel=0.01)  # 5 forwards and backwards of length 1 and 2
    assert above.get_xlim()[1] == pytest.approx(real.seconds * 1e3, rel=0.01)
    assert sorted(text.get_text() for text in below.texts) == sorted("0123" * 2 * 2)
    assert {text.get_text() for text in below.figure.legends[0].texts} == {"forward", "backward", "idle"}


def test_weights_and_chunks_of_a_pipeline_look_different_in_grey(axes_of):
    split = schedule_of("zero_bubble", 2, 2, backward=1.0, weight=1.0)
    pipeline.schedule(split, split, title="split")
    assert {pipeline.KINDS[kind][1] for kind in "BW"} <= {box.get_hatch() for box in axes_of().collections}
    assert "backward for weights" in {text.get_text() for text in axes_of().figure.legends[0].texts}
    draw("schedule")
    assert "chunk 1: paler" in {text.get_text() for text in axes_of().figure.legends[0].texts}
    assert len({kind[1] for kind in pipeline.KINDS.values()}) == 3


def test_a_grid_shows_every_rank_its_group_and_what_its_axes_use(axes_of):
    draw("grid")
    shown = texts(axes_of().figure)
    assert [shown.count(str(rank)) for rank in range(8)] == [1] * 8
    assert [shown.count(letter) for letter in "ABCD"] == [2] * 4
    assert shown[-1].splitlines() == [
        "pp (pipeline): 4 groups of 2, across 2 machines",
        "dp (data): 4 groups of 2, inside a machine",
        "tp (tensor): 4 groups of 2, inside a machine",
    ]
    for axis, style_of_line in (("pp", "--"), ("tp", "-")):  # dashed where it leaves the machine
        grid.rank_grid(Grid(dp=2, pp=2, tp=2), axis=axis, per_node=4)
        (joined,) = [text.arrow_patch for text in axes_of().texts if getattr(text, "arrow_patch", None)]
        assert joined.get_linestyle() == style_of_line


def test_groups_of_a_grid_differ_in_grey_too(axes_of):
    grid.rank_grid(Grid(dp=4, pp=2, tp=4), axis="tp")
    looks = [(p.get_facecolor(), p.get_hatch()) for p in axes_of().patches if p.get_width() == 0.9]
    assert len(looks) == 32 and len(set(looks)) == 8
    assert len({hatch for _, hatch in looks[:16]}) == 4


def test_a_large_grid_shows_its_first_machines(axes_of):
    alt = grid.rank_grid(Grid(dp=16, pp=8, tp=8), axis="dp").alt
    assert "64" not in texts(axes_of().figure) and "63" in texts(axes_of().figure)
    assert "the first 8 of 128 machines" in alt and "the first 8 of 128 machines" in axes_of().get_title()


def test_ring_attention_shows_who_has_whose_keys(axes_of):
    draw("ring attention")
    axes = axes_of().figure.axes
    for axis in axes:
        shown = [text.get_text() for text in axis.texts]
        for rank in range(4):
            assert shown[5 * rank : 5 * rank + 4] == [str((rank - step) % 4) for step in range(4)]
    computed = [sum(isinstance(patch, Polygon) for patch in axis.patches) for axis in axes]
    assert computed == [10, 36]  # pairs of runs that are not all future: 4 x 5 / 2, and 3 + 3 x 2 for each of 4 ranks


def test_the_ring_is_finished_after_its_last_step_and_not_before():
    for ranks in (2, 3, 4, 5):
        states = [collectives.ring_state(ranks, now)[0] for now in range(2 * ranks - 1)]
        whole = [sum(len(content) == ranks for row in state for content, _ in row) for state in states]
        assert whole[ranks - 1] == ranks, "the first half leaves one finished chunk per rank"
        assert whole[-1] == ranks**2 and whole[-2] < ranks**2
    middle, _ = collectives.ring_state(4, 3)
    assert all(len(middle[rank][rank][0]) == 4 for rank in range(4)), "rank r owns chunk r"


def messages_of_the_ring(elements):
    import torch

    from course_lib.collectives.by_hand import Traffic, ring

    with Traffic() as traffic:
        ring.all_reduce(torch.ones(elements), check=False)
    return traffic.messages, traffic.to


def test_the_picture_has_the_messages_of_the_ring(private_tmp):
    steps = [collectives.ring_state(4, now)[1] for now in range(1, 7)]
    assert all(sorted(chunk for _, chunk, _ in sent) == [0, 1, 2, 3] for sent in steps)
    run = launch(messages_of_the_ring, 32, ranks=4, quiet=True)
    for rank, (messages, receivers) in enumerate(run.results):
        drawn = [receiver for sent in steps for sender, _, receiver in sent if sender == rank]
        assert messages == len(drawn) and set(receivers) == set(drawn) == {(rank + 1) % 4}


def test_pyplot_is_left_alone():
    """Neither its list of figures nor its settings change; where a notebook has not imported it, it stays out."""
    code = """
import sys
from test_figures import draw
kinds = ("losses", "timeline", "throughput", "bars", "ledger")
for name in kinds:
    draw(name)
assert "matplotlib.pyplot" not in sys.modules, "pyplot came in"
import matplotlib.pyplot as plt
mine = plt.figure()
before = dict(plt.rcParams)
for name in kinds:
    draw(name)
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
    assert nice_bytes(value) == said


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
    assert nice_number(value) == said
