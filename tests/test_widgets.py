"""Widgets: they move with their menus and sliders, and answer what the library answers."""

from __future__ import annotations

import re

import pytest

from course_lib.memory import CARDS, estimate, shape_of
from course_lib.notebook.widgets import grid_explorer as explorer
from course_lib.notebook.widgets.calculator import START, answer, calculator
from course_lib.notebook.widgets.grid_explorer import axis_traffic, grid_explorer, static_page
from course_lib.notebook.widgets.ring_stepper import ring_stepper
from course_lib.parallel.grid import Grid


def controls(widget):
    return {control.description: control for column in widget.children[0].children for control in column.children}


def test_answer_is_the_estimate():
    setting = {name: value for name, value in START.items() if name != "card"}
    need, words = answer(card_name="t4", **(setting | {"gpus": 1, "method": "qlora"}))
    assert need == estimate("llama-3.1-8b", method="qlora", precision="fp16-mixed")  # a T4 has no bf16
    assert need.fits(CARDS["t4"].memory) is False and "does not fit" in words


def test_a_slider_redraws_picture_and_words():
    widget = calculator()
    words, _, picture = widget.children[1].value.partition("<img alt='")
    controls(widget)["tokens each"].value = 16384
    words_now, _, picture_now = widget.children[1].value.partition("<img alt='")
    assert words_now != words and picture_now != picture
    assert "data:image/png;base64,iVBOR" in picture_now and "peak" in picture_now


def test_one_gpu_shares_with_nobody():
    widget = calculator(gpus=1)
    assert controls(widget)["shared by"].disabled
    controls(widget)["GPUs"].value = 8
    assert not controls(widget)["shared by"].disabled


def test_start_can_be_chosen_and_a_wrong_name_is_told():
    assert "smollm2-135m" in calculator(model="smollm2-135m").children[1].value
    with pytest.raises(ValueError, match="no 'gpu'"):
        calculator(gpu=2)


def test_the_slider_steps_the_ring():
    widget = ring_stepper(4)
    (_, slider), shown = widget.children[0].children, widget.children[1]
    assert slider.max == 6 and "nothing was sent yet" in shown.value
    slider.value = 6
    assert "16 of 16 chunks hold the whole sum" in shown.value


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: ring_stepper(9), "ranks=9: choose from 2 to 8"),
        (lambda: grid_explorer(gpus=2), "The explorer has no 'gpus': it has model, dp"),
        (lambda: explorer.answer(pp=128), "80 layers"),
        (lambda: explorer.answer(cp=3), "seq_len=8192 does not divide over cp=3"),
        (lambda: explorer.answer(tp=3), "over 3 tensor-parallel ranks"),
        (lambda: explorer.answer(outer="string"), "string"),
    ],
)
def test_misfits_get_a_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        wrong()


def cells(widget):
    """The explorer's table as lines such as "tp on 8"."""
    found = re.findall(r"<tr><td[^>]*>([^<]+)</td><td[^>]*>(\d+)</td>", widget.children[1].value)
    return [f"{axis} on {ranks}" for axis, ranks in found]


def test_traffic_is_summed_over_a_step_and_timed_on_the_link_that_the_axis_uses():
    shape = shape_of("llama-3.1-8b")
    grid = Grid(dp=2, pp=2, tp=4, cp=2)
    found = {one.axis: one for one in axis_traffic(shape, grid, num_microbatches=8, seq_len=4096, strategy="ddp")}
    assert list(found) == ["tp", "cp", "pp", "dp"]
    sizes = {axis: (one.ranks, one.nodes) for axis, one in found.items()}
    assert sizes == {"tp": (4, 1), "cp": (2, 1), "pp": (2, 2), "dp": (4, 2)}
    assert "NVSwitch" in found["tp"].link and "InfiniBand" in found["dp"].link
    states = 4096 // 2 * shape.hidden * 2  # a rank's tokens of one sequence, bf16
    assert found["pp"].payload == 8 * states and found["pp"].messages == 8
    assert (
        found["dp"].payload == 4 * shape.parameters / 8 and found["dp"].messages == 1
    )  # once, however many micro-batches
    assert found["dp"].seconds == pytest.approx(2 * 3 / 4 * found["dp"].payload / 50e9, rel=1e-3)
    assert found["pp"].seconds == pytest.approx(found["pp"].payload / 50e9, rel=0.05)
    twice = {one.axis: one for one in axis_traffic(shape, grid, num_microbatches=16, seq_len=4096, strategy="ddp")}
    assert [twice[axis].payload / found[axis].payload for axis in found] == [2, 2, 2, 1]
    assert axis_traffic(shape, Grid()) == []


def test_the_explorer_answers_and_has_a_fallback_for_pages_without_widgets():
    widget = grid_explorer(dp=4, pp=1, tp=2, per_node=4, model="llama-3.1-8b")
    bundle = widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert (
        bundle["text/html"]
        == static_page(dp=4, pp=1, tp=2, per_node=4, model="llama-3.1-8b")
        == widget.children[1].value
    )
    assert "llama-3.1-8b on 8 GPUs" in bundle["text/html"] and "alt=" in bundle["text/html"]
    controls = {c.description: c for box in widget.children[0].children for c in box.children}
    controls["tp (tensor)"].value = 8
    assert "on 32 GPUs" in widget.children[1].value and "tp on 8" in cells(widget)
    controls["pp (pipeline)"].value = 32
    controls["cp (context)"].value = 2
    assert "dp x cp on 8" in cells(widget)
    controls["model"].value = "llama-3.2-1b"  # 16 layers
    assert "Does not fit." in widget.children[1].value and "32" in widget.children[1].value
    assert set(explorer.START) >= {"dp", "pp", "tp", "cp", "model", "axis"}
