"""The pictures of the rank grid and of the ring, and the explorer: what they say, what they refuse, what it reckons."""

from __future__ import annotations

import re

import pytest
from matplotlib.patches import Polygon

from course_lib.figures.grid import draw_rank_grid, draw_ring_steps, rank_grid, ring_steps
from course_lib.memory import shape_of
from course_lib.notebook.widgets.grid_explorer import START, answer, axis_traffic, grid_explorer, still
from course_lib.parallel.grid import Grid


def words(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts] + [text.get_text() for text in figure.texts]


def test_a_grid_shows_every_rank_its_group_and_what_its_axes_use():
    figure, alt = draw_rank_grid(Grid(dp=2, pp=2, tp=2), axis="pp", per_node=4)
    told = words(figure)
    assert [told.count(str(rank)) for rank in range(8)] == [1] * 8
    assert [told.count(letter) for letter in "ABCD"] == [2] * 4
    assert told[-1].splitlines() == [
        "pp (pipeline): 4 groups of 2, across 2 machines",
        "dp (data): 4 groups of 2, inside a machine",
        "tp (tensor): 4 groups of 2, inside a machine",
    ]
    assert "8 ranks, pp=2 x dp=2 x tp=2, on 2 machines of 4" in alt
    assert "A: ranks 0, 4; B: ranks 1, 5" in alt and alt.endswith("inside a machine.")
    (line,) = [text.arrow_patch for text in figure.axes[0].texts if getattr(text, "arrow_patch", None)]
    assert line.get_linestyle() == "--"  # it leaves the machine
    figure, _ = draw_rank_grid(Grid(dp=2, pp=2, tp=2), axis="tp", per_node=4)
    (line,) = [text.arrow_patch for text in figure.axes[0].texts if getattr(text, "arrow_patch", None)]
    assert line.get_linestyle() == "-"


def test_groups_differ_in_grey_too():
    figure, _ = draw_rank_grid(Grid(dp=4, pp=2, tp=4), axis="tp")
    looks = [(p.get_facecolor(), p.get_hatch()) for p in figure.axes[0].patches if p.get_width() == 0.9]
    assert len(looks) == 32 and len(set(looks)) == 8
    assert len({hatch for _, hatch in looks[:16]}) == 4


def test_a_large_grid_shows_its_first_machines():
    figure, alt = draw_rank_grid(Grid(dp=16, pp=8, tp=8), axis="dp")
    assert "64" not in words(figure) and "63" in words(figure)
    assert "the first 8 of 128 machines" in alt and "the first 8 of 128 machines" in figure.axes[0].get_title()
    one = rank_grid(Grid())
    assert one.data.startswith(b"\x89PNG") and "A grid of one rank, on 1 machine of 8" in one.alt


def test_the_ring_shows_who_has_whose_keys_and_how_even_the_work_is():
    figure, alt = draw_ring_steps(4)
    assert "contiguous: rank 0 0.5, rank 1 1.5, rank 2 2.5, rank 3 3.5 squares" in alt
    assert "zigzag: rank 0 2, rank 1 2, rank 2 2, rank 3 2 squares" in alt
    for axis in figure.axes:
        numbers = [text.get_text() for text in axis.texts]
        for rank in range(4):
            assert numbers[5 * rank : 5 * rank + 4] == [str((rank - step) % 4) for step in range(4)]
    computed = [sum(isinstance(patch, Polygon) for patch in axis.patches) for axis in figure.axes]
    assert computed == [10, 36]  # pairs of runs that are not all future: 4 x 5 / 2, and 3 + 3 x 2 for each of 4 ranks
    assert ring_steps(2, layouts=["zigzag"]).data.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: rank_grid(Grid(), axis="ep"), "axis='ep': choose one of"),
        (lambda: rank_grid(Grid(), per_node=17), "per_node=17: choose from 1 to 16"),
        (lambda: rank_grid(Grid(), per_node=0), "per_node=0"),
        (lambda: ring_steps(9), "ranks=9: choose from 2 to 8"),
        (lambda: ring_steps(2, layouts=[]), "at least one layout"),
        (lambda: ring_steps(2, layouts=["stripes"]), "layout='stripes'"),
        (lambda: grid_explorer(gpus=2), "The explorer has no 'gpus': it has model, dp"),
        (lambda: answer(pp=128), "80 layers"),
        (lambda: answer(cp=3), "seq_len=8192 does not divide over cp=3"),
        (lambda: answer(tp=3), "tp=3"),
        (lambda: answer(outer="string"), "string"),
    ],
)
def test_misfits_get_a_sentence(wrong, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        wrong()


def test_traffic_is_summed_over_a_step_and_timed_on_the_link_that_the_axis_uses():
    shape = shape_of("llama-3.1-8b")
    grid = Grid(dp=2, pp=2, tp=4, cp=2)
    found = {one.axis: one for one in axis_traffic(shape, grid, micro_batches=8, seq_len=4096, strategy="ddp")}
    assert list(found) == ["tp", "cp", "pp", "dp"]
    assert {axis: (one.ranks, one.nodes) for axis, one in found.items()} == {
        "tp": (4, 1), "cp": (2, 1), "pp": (2, 2), "dp": (4, 2),
    }  # fmt: skip
    assert "NVSwitch" in found["tp"].link and "InfiniBand" in found["dp"].link
    states = 4096 // 2 * shape.hidden * 2  # a rank's tokens of one sequence, bf16
    assert found["pp"].payload == 8 * states and found["pp"].messages == 8
    assert (
        found["dp"].payload == 4 * shape.parameters / 8 and found["dp"].messages == 1
    )  # once, however many micro-batches
    assert found["dp"].seconds == pytest.approx(2 * 3 / 4 * found["dp"].payload / 50e9, rel=1e-3)
    assert found["pp"].seconds == pytest.approx(found["pp"].payload / 50e9, rel=0.05)
    twice = {one.axis: one for one in axis_traffic(shape, grid, micro_batches=16, seq_len=4096, strategy="ddp")}
    assert [twice[axis].payload / found[axis].payload for axis in found] == [2, 2, 2, 1]
    assert axis_traffic(shape, Grid()) == []


def test_the_explorer_answers_and_has_a_still_for_pages_without_widgets():
    widget = grid_explorer(dp=4, pp=1, tp=2, per_node=4, model="llama-3.1-8b")
    bundle = widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"] == still(dp=4, pp=1, tp=2, per_node=4, model="llama-3.1-8b") == widget.children[1].value
    assert "llama-3.1-8b on 8 GPUs" in bundle["text/html"] and "alt=" in bundle["text/html"]
    controls = {c.description: c for box in widget.children[0].children for c in box.children}
    controls["tp (tensor)"].value = 8
    assert "on 32 GPUs" in widget.children[1].value and "<td>tp</td><td>8</td>" in widget.children[1].value
    controls["pp (pipeline)"].value = 32
    controls["cp (context)"].value = 2
    assert "<td>dp x cp</td><td>8</td>" in widget.children[1].value
    controls["model"].value = "llama-3.2-1b"  # 16 layers
    assert "Does not fit." in widget.children[1].value and "32" in widget.children[1].value
    assert set(START) >= {"dp", "pp", "tp", "cp", "model", "axis"}
