"""Lesson 6's pictures tell their numbers, and refuse what cannot be drawn."""

import pytest

from course_lib.figures import fsdp as pictures
from course_lib.observe import Span

CURVE = [(0, 2**20), (10, 3 * 2**20), (20, 2**20)]
SPANS = [
    Span("forward", "forward", 0.0, 1.0, 7),
    Span("FSDP::pre_forward (model.layers.0)", "other", 1.0, 1.4, 7),
    Span("FSDP::all_gather (model.layers.0)", "other", 1.1, 1.3, 7),
    Span("FSDP::pre_forward (model.layers.1)", "other", 2.0, 2.1, 7),
    Span("FSDP::post_backward_reduce", "other", 3.0, 3.3, 7),
    Span("gloo:all_gather", "collective", 1.1, 1.3, 8),
    Span("forward", "forward", 1.1, 1.2, 8),
]


def test_a_curve_tells_its_peak_and_the_prediction():
    alt = pictures.memory_by_unit({"mine": CURVE}, units=[("0", 5, 15)], lines={"predicted": 2**21}, title="t").alt
    assert "mine peaks at 3.00 MiB" in alt and "predicted is 2.00 MiB" in alt


def test_stretches_inside_others_do_not_count_twice():
    found = pictures.waits(SPANS)
    assert list(found) == ["pre_forward", "post_backward_reduce"]
    assert found["pre_forward"] == pytest.approx(0.5) and found["post_backward_reduce"] == pytest.approx(0.3)


def test_a_trace_and_a_mesh_tell_what_they_show():
    assert "800 ms" in pictures.step_trace({"as it is": SPANS}, title="t").alt
    alt = pictures.mesh(2, 3, inside="weights", between="gradients", title="t").alt
    assert "2 machines with 3 ranks" in alt and "weights" in alt and "gradients" in alt


@pytest.mark.parametrize(
    "draw",
    [
        lambda: pictures.memory_by_unit({}, title="t"),
        lambda: pictures.memory_by_unit({"still": [(0, 1)]}, title="t"),
        lambda: pictures.step_trace({"ddp": SPANS[:1]}, title="t"),
        lambda: pictures.mesh(1, 4, inside="", between="", title="t"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(draw):
    with pytest.raises(ValueError):
        draw()
