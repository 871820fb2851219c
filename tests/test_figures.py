"""Figures: each draws, says in words what it shows, and needs neither colours nor pyplot; the data stands where it should."""

from __future__ import annotations

import importlib
import inspect
import io
import itertools
import json
import os
import pkgutil
import re
import warnings
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from readable import told_apart_in_grey
from refusals import assert_refused

from course_lib import figures
from course_lib.collectives.measuring import Curve, Point
from course_lib.figures import (
    collectives,
    links,
    number_formats,
    pipeline,
    ranks,
    ring,
    sharding,
    splits,
    style,
    units,
)
from course_lib.figures import training as training_figures
from course_lib.figures.stored_figures import pictures
from course_lib.memory import estimate
from course_lib.memory.allocator import replay
from course_lib.memory.timeline import step_timeline
from course_lib.observe import Span
from course_lib.observe.snapshots import Snapshot
from course_lib.observe.units import Moment, UnitTimeline
from course_lib.parallel.schedules import orders
from course_lib.parallel.simulate import simulate
from course_lib.units import MIB, nice_bytes, nice_number

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"


def ddp_step(late: float = 0.0) -> list[Span]:
    """One DDP step of 50 ms in which the all-reduces travel under the backward pass, and something else runs."""
    rows = [
        ("forward", 0, 10, 1),
        ("backward", 10, 30, 1),
        ("collective", 15, 25, 2),
        ("collective", 25, 40, 2),
        ("optimizer", 40, 45, 1),
        ("other", 45, 50, 1),
    ]
    return [Span(kind, kind, 100 + late + a / 1e3, 100 + late + b / 1e3, thread) for kind, a, b, thread in rows]


def schedule_of(schedule, stages=2, micro_batches=4, chunks=1, **times):
    return simulate(orders(schedule, stages, micro_batches, chunks), **times)


SNAPSHOT = Snapshot(np.array([1, 2, 1]), np.array([2, 2, 2]), [])
ALLOCATOR = replay([(True, 0, 20 * MIB), (True, 1, 20 * MIB), (False, 0, 0)])
STEP = UnitTimeline(
    [2 * MIB, 5 * MIB, 3 * MIB, 2 * MIB],
    [Moment(0, "between steps", {"a": 0.0}), Moment(1, "forward of a begins", {"a": 1.0})]
    + [Moment(3, "backward is over", {"a": 0.0})],
    sharded=0.5,
)
HELD = [
    {"name": "DDP", "measured": {"parameters": 3 * MIB, "gradients": 3 * MIB, "peak": 99 * MIB}, "predicted": 6 * MIB},
    {"name": "ZeRO-3", "predicted": {"parameters": MIB, "master": MIB, "total": 2 * MIB, "padding": 5}},
]
SENT = [
    {"name": "FSDP2", "counted": {"all_gather": 2 * MIB, "reduce_scatter": MIB}, "formula": 4 * MIB},
    {"name": "DDP", "counted": 3 * MIB},
]
STATE = np.abs(np.random.default_rng(0).normal(size=512)) * 1e-6
LOGGED = {
    rank: {name: [(step, rank + 1.0 / (step + 1)) for step in range(9)] for name in ("loss", "memory_bytes")}
    for rank in range(3)
}
POINTS = tuple(Point(2**n, t, t * 0.9, t * 1.4) for n in (10, 14, 20) if (t := 1e-4 * n))
CURVE_BY_SIZE = Curve(4, POINTS, {"backend": "gloo"})

# At least one picture of every function that draws.
DRAWINGS = [
    partial(figures.timeline, [ddp_step(), ddp_step(0.001)], title="One DDP step", names=["one", "the other"]),
    partial(figures.fitted_curve, CURVE_BY_SIZE, CURVE_BY_SIZE.fit(), held_out=[2**14]),
    partial(links.seconds_by_size, [2**10, 2**20], {"ring": [2.0, 3.0], "tree": [1.0, 9.0]}, title="Ways"),
    partial(figures.step_memory, step_timeline("smollm2-135m"), title="A step"),
    partial(figures.against_cards, {"tiny": estimate("tiny")}, cards={"a card": 2**30}, title="Fits?"),
    partial(figures.stacked_against_cards, {"a": {"engine": 1, "cache": 2}, "b": {}}, cards={"c": 9}, title="Parts"),
    partial(figures.allocated_and_reserved, SNAPSHOT, title="Reserved", note="emulated"),
    partial(figures.segments, {"now": ALLOCATOR.segments}, title="Segments", note="simulated"),
    partial(number_formats.gradient_window, {"plain": [2.0**-30, 1.0, 0.0], "scaled": [2.0**-14, 2.0**16]}),
    partial(number_formats.blockwise_state, STATE, {"flat": STATE * (STATE > 1e-6)}, block=256, title="A state"),
    partial(number_formats.four_bit_levels, np.linspace(-1, 1, 64), {"even": np.linspace(-1, 1, 16)}),
    *(partial(collectives.before_and_after, [kind]) for kind in collectives.KINDS),
    partial(collectives.ring_step, 4, 6),
    partial(collectives.by_ranks, {"ring": {2: 1, 4: 1.5}}, {"ring": {2: 1, 4: 1.5}}, unit="messages", title="Sent"),
    partial(collectives.seconds_by_link, {"slow": 1.0, "fast": 0.1}, title="1 GB"),
    partial(sharding.bytes_by_stage, HELD, note="2 ranks"),
    partial(
        sharding.bytes_by_stage, [{"name": "large", "computed": {"parameters": 9e12}}, {"name": "none", "computed": {}}]
    ),
    partial(sharding.traffic, SENT, note="counted by the system"),
    partial(units.units_over_step, STEP, 1, title="A step"),
    partial(training_figures.time_lost, [1, 10, 100], {"8 GPUs": [0.2, 0.1, 0.3]}, {"8 GPUs": 12}, title="Lost"),
    partial(training_figures.packing, [[400, 300], [500]], 1024, title="Packed"),
    partial(ranks.side_by_side, LOGGED | {3: {"loss": [(0, 2.5)]}}, title="Four ranks"),
    partial(splits.column_then_row),
    partial(pipeline.timelines, {"chunks": schedule_of("interleaved", 2, 2, 2)}, title="Two chunks"),
    partial(pipeline.timelines, {n: schedule_of(n, send=0.1) for n in ("naive", "gpipe")}, title="Two"),
    partial(ring.ring_steps, 4),
]


def functions_that_draw() -> set:
    """The public functions of course_lib.figures that return a picture; `style` has the last step of all of them."""
    modules = [f"course_lib.figures.{module.name}" for module in pkgutil.iter_modules(figures.__path__)]
    functions = [
        f for name in modules for _, f in inspect.getmembers(importlib.import_module(name), inspect.isfunction)
    ]
    drawing = {f for f in functions if f.__name__[0] != "_" and f.__annotations__.get("return") == "Picture"}
    return drawing - {style.picture}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were turned into pictures, in order."""
    kept = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **kw: (kept.append(figure), real(figure, file, **kw)))
    return kept


def test_every_function_draws_with_words_and_title_and_survives_grey(drawn):
    assert {drawing.func for drawing in DRAWINGS} == functions_that_draw()
    wrong = []
    for drawing in DRAWINGS:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            bundle = drawing()._repr_mimebundle_()
        [(stored, alt)] = pictures({"data": bundle})
        kind, _, data = stored.partition(";base64,")
        pixels = np.asarray(Image.open(io.BytesIO(style.png(drawn[-1]))).convert("L"), dtype=float)
        titles = [axis.get_title(loc=place) for axis in drawn[-1].axes for place in ("center", "left")]
        many_points = drawing.func in (figures.step_memory, number_formats.blockwise_state)
        facts = {
            "SVG, or PNG where there are too many points": kind == f"data:image/{'png' if many_points else 'svg+xml'}",
            "small": len(data) < 90_000 and pixels.shape[1] > 1200,
            "ink on it": pixels.std() > 10 and (pixels < 128).mean() > 0.003,
            "alternative text": len(alt) > 30 and alt in bundle["text/plain"],
            "title": any(titles) or bool(drawn[-1].get_suptitle()),
            "nothing squeezed or left out": not warned,
            "readable in grey": not told_apart_in_grey(drawn[-1]),
        }
        wrong += [f"{drawing.func.__name__}: {fact}" for fact, holds in facts.items() if not holds]
    assert not wrong


def test_an_svg_is_the_figure_its_words_are_text_and_the_same_figure_gives_the_same_bytes():
    figure, (axis,) = style.new_figure()
    axis.bar(["one", "two", "three"], [1, 2, 3], color=style.COLOURS[:3], hatch=["", "..", "//"])
    axis.set_title("M 2.7182 C > L 3.1415")  # the reader's numbers stay, whatever is done to places on the page
    drawn = style.svg(figure)
    assert drawn == style.svg(figure) and len(drawn) < 10_000
    root = ElementTree.fromstring(drawn)
    assert {"one", "two", "M 2.7182 C > L 3.1415"} <= {text.text for text in root.iter(f"{SVG}text")}
    patterns = [pattern.find(f"{SVG}path") for pattern in root.iter(f"{SVG}pattern")]
    rules = dict(re.findall(r"\.(s\d+)\{([^}]*)\}", drawn.decode()))
    assert sorted("round" in rules[path.get("class")] for path in patterns) == [False, True]
    assert all(len(path.get("d")) < 4000 for path in patterns)
    blue = next(name for name, rule in rules.items() if f"fill: {style.COLOURS[0].lower()}" in rule)
    [bar] = [path for path in root.iter(f"{SVG}path") if path.get("class") == blue]
    [(y, other)] = re.findall(r"^M[\d.]+ ([\d.]+)H[\d.]+V([\d.]+)H[\d.]+z$", bar.get("d").strip())
    bottom, top = axis.transData.transform([(0, 0), (0, 1)])[:, 1] * 72 / figure.dpi
    assert abs(float(y) - float(other)) == pytest.approx(top - bottom, abs=0.2)


def test_each_notebook_opens_with_its_lessons_drawing():
    drawings = {path.stem: ElementTree.parse(path).getroot() for path in (ROOT / "lessons" / "pictures").glob("0*.svg")}
    assert set(drawings) == {path.stem for path in (ROOT / "lessons").glob("0[1-9]_*.ipynb")}
    titles = {name[:2]: root.findtext(f"{SVG}title").strip() for name, root in drawings.items()}
    rooms = ("lessons", "lessons/deeper", "labs", "solutions")
    for path in [path for room in rooms for path in (ROOT / room).glob("0[1-9]_*.ipynb")]:
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        [(words, file)] = re.findall(r"^!\[(.*)\]\((.*)\)$", first, re.MULTILINE)
        assert words == titles[path.name[:2]] and (path.parent / file).stem[:2] == path.name[:2], path
        assert (path.parent / file).is_file(), path
    ring = ElementTree.parse(ROOT / "lessons" / "pictures" / "ring.svg").findtext(f"{SVG}title")
    for name in ("README.md", "site/index.md", "lessons/00_start_here.ipynb"):
        assert f"![{ring}](" in (ROOT / name).read_text(encoding="utf-8"), name


def test_the_moving_ring_is_the_ring():
    """Each quarter of each rank's bar appears in the step in which the ring has added it there, or passed it on."""
    root = ElementTree.parse(ROOT / "lessons" / "pictures" / "ring.svg").getroot()
    parts = [box for box in root.iter(f"{SVG}rect") if box.get("width") == "28"]
    columns, rows = (sorted({float(box.get(side)) for box in parts}) for side in ("x", "y"))
    assert len(parts) == 64 and len(columns) == 16 and len(rows) == 4
    appears = {}
    for box in parts:
        rank, part = divmod(columns.index(float(box.get("x"))), 4)
        appears[rank, rows.index(float(box.get("y"))), part] = int((box.get("class") or "s0")[1:])
    for step in range(7):
        state, sent = collectives.ring_state(4, step)
        arrived = [box for box in root.iter(f"{SVG}rect") if box.get("class") == f"say t{step}"]
        places = {((int(box.get("x")) - 52) / 180, (int(box.get("y")) - 94) / 37) for box in arrived}
        assert places == {(receiver, chunk) for _, chunk, receiver in sent}, "the frames of this step"
        held = {(rank, chunk, part) for rank, row in enumerate(state) for content, chunk in row for part in content}
        assert held == {place for place, first in appears.items() if first <= step}, step


def test_notebooks_have_their_headings_in_order_and_words_for_every_picture():
    wrong = []
    for path in sorted(path for room in ("lessons", "labs", "solutions") for path in (ROOT / room).glob("0*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        prose = re.sub(r"^(```|~~~).*?^\1", "", prose, flags=re.MULTILINE | re.DOTALL)
        levels = [len(marks) for marks in re.findall(r"^(#{1,6}) +", prose, re.MULTILINE)]
        if levels[:1] != [1] or levels.count(1) != 1:
            wrong.append(f"{path}: one title, at the top")
        if any(below > above + 1 for above, below in itertools.pairwise(levels)):
            wrong.append(f"{path}: a level of headings is left out")
        for data in (output.get("data", {}) for cell in cells for output in cell.get("outputs", [])):
            images = re.findall(r"<img\b[^>]*>", "".join(data.get("text/html", "")))
            # JupyterLab shows a PNG without its text
            if "image/png" in data or not all(re.search(r"\balt=['\"][^'\"]{30}", image) for image in images):
                wrong.append(f"{path}: a picture without words")
    assert not wrong


def test_a_timeline_has_each_ranks_collectives_below_its_computation(drawn):
    figures.timeline([ddp_step(), ddp_step(0.001), []], title="Rank 2 was not traced")
    axis = drawn[-1].axes[0]
    colour, hatch = training_figures.KINDS["collective"]
    bars = [(bar.get_facecolor()[0], bar.get_hatch(), bar.get_paths()[0].get_extents()) for bar in axis.collections]
    assert len(bars) == 2 * 5  # "other" is not drawn
    collective = [box for face, h, box in bars if np.allclose(face[:3], to_rgb(colour)) and h == hatch]
    assert [(round(box.x0), round(box.x1)) for box in collective] == [(15, 25), (25, 40), (16, 26), (26, 41)]
    ticks = axis.get_yticks()
    on_each = [sum(box.y0 < tick < box.y1 for _, _, box in bars) for tick in ticks]
    assert on_each == [3, 2, 3, 2, 0, 0], "a rank without spans keeps its place"
    assert all(any(box.y0 < tick < box.y1 for tick in ticks[1::2]) for box in collective)


def test_bars_are_as_long_as_what_they_stand_for(drawn):
    need = estimate("llama-3.1-8b")
    figures.against_cards({"8B": need}, cards={"80": 80 * 2**30}, title="t")
    widths = [bar.get_width() * 2**30 for bar in drawn[-1].axes[0].patches]
    parts = [size for size in need.at_peak.values() if size]
    assert widths == pytest.approx([*parts, need.device - need.peak]) and sum(widths) == pytest.approx(need.device)
    sharding.bytes_by_stage(HELD)
    widths = [round(bar.get_width(), 6) for bar in drawn[-1].axes[0].patches]
    assert widths == [3, 3, 6, 1, 1], "peak, total and padding are no parts of the stack"
    sharding.traffic(SENT)
    assert [round(bar.get_width(), 6) for bar in drawn[-1].axes[0].patches] == [2, 1, 3]


def test_the_ring_is_finished_after_its_last_step_and_not_before():
    for size in (2, 3, 4, 5):
        moments = [collectives.ring_state(size, now) for now in range(2 * size - 1)]
        whole = [sum(len(content) == size for row in state for content, _ in row) for state, _ in moments]
        assert whole[size - 1] == size, "the first half leaves one finished chunk per rank"
        assert whole[-1] == size**2 and whole[-2] < size**2
        for _, sent in moments[1:]:  # each rank sends one chunk, to its neighbour
            assert sorted((sender, to) for sender, _, to in sent) == [(r, (r + 1) % size) for r in range(size)]


def test_each_ranks_event_files_are_drawn_after_a_resume_and_after_a_kill(tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    figures_of = []
    picture = style.picture
    monkeypatch.setattr(ranks, "picture", lambda figure, *words: figures_of.append(figure) or picture(figure, *words))
    runs = {0: [(0, [5.0, 4.0, 3.0]), (1, [2.5, 2.25])], 1: [(0, [7.0, 6.0, 5.5, 5.25])]}
    for rank, lives in runs.items():
        for life, (first, losses) in enumerate(lives):  # rank 0 was resumed from step 1
            with SummaryWriter(tmp_path / f"rank{rank}", filename_suffix=f".{life}") as writer:
                for step, loss in enumerate(losses, first):
                    writer.add_scalar("loss", loss, step)
                    writer.add_scalar("memory_bytes", 2**30 * (rank + 1), step)
    (last,) = (tmp_path / "rank1").iterdir()
    os.truncate(last, last.stat().st_size - 5)  # killed in the middle of its last record, which is the memory's
    (tmp_path / "rank1.old").mkdir()  # no rank's folder
    ranks.side_by_side(tmp_path)
    loss, memory = (
        {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axis.lines}
        for axis in figures_of[0].axes[:2]
    )
    assert loss == {"rank 0": [(0, 5), (1, 2.5), (2, 2.25)], "rank 1": [(0, 7), (1, 6), (2, 5.5), (3, 5.25)]}
    assert memory == {"rank 0": [(0, 1), (1, 1), (2, 1)], "rank 1": [(0, 2), (1, 2), (2, 2)]}


def test_what_cannot_be_drawn_is_refused(tmp_path):
    (tmp_path / "silent" / "rank0").mkdir(parents=True)
    assert_refused(
        [
            (lambda: figures.timeline([[], []], title="x"), ValueError, "spans"),
            (lambda: figures.segments({}, title="t", note="n"), ValueError, ""),
            (lambda: style.picture(style.new_figure()[0], "  "), ValueError, "alternative text"),
            (lambda: number_formats.gradient_window({"zeros": [0.0]}), ValueError, "'zeros'"),
            (lambda: collectives.before_and_after(["gossip"]), ValueError, "broadcast"),
            (lambda: collectives.ring_state(4, 7), ValueError, "step=7"),
            (lambda: sharding.bytes_by_stage([{"name": "ZeRO-9", "measured": {"peak": 5}}]), ValueError, "'ZeRO-9'"),
            (lambda: ranks.side_by_side(tmp_path / "nothing"), ValueError, "no folder of a rank"),
            (lambda: ranks.side_by_side(tmp_path / "silent"), ValueError, "Logged: nothing"),
        ]
    )


def test_bytes_and_numbers_for_the_page():
    sizes = {1023: "1023 bytes", 1024: "1.00 KiB", -5767168: "-5.50 MiB", 80 * 2**30: "80.00 GiB"}
    assert {value: nice_bytes(value) for value in sizes} == sizes
    numbers = [(0, "0"), (1234567, "1,234,567"), (1.5, "1.5"), (1.2345e-5, "1.234e-05"), (-2048.0, "-2,048")]
    assert [(value, nice_number(value)) for value, _ in numbers] == numbers
    assert [nice_number(value) for value in (np.float32(0.1), float("nan"), 10**20)] == ["0.1", "nan", f"{10**20:,}"]
