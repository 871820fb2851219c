"""Lesson 1's pictures: they show what they are given, carry a text, and refuse nothing to draw."""

import pytest

from course_lib import figures
from course_lib.figures.memory import draw_against_card
from course_lib.memory import estimate
from course_lib.memory.allocator import replay

MIB = 2**20
CURVE = [(0, 10 * MIB), (10**9, 40 * MIB), (2 * 10**9, 15 * MIB)]
PHASES = {"forward": (0, 10**9), "backward": (10**9, 2 * 10**9)}


def test_step_over_time_tells_its_peak_and_when():
    shown = figures.memory_over_time(CURVE, floors={"weights": 10 * MIB}, phases=PHASES)
    assert "peak 40 MiB at 1.00 s" in shown.alt and "weights 10.00 MiB" in shown.alt


def test_needs_against_a_card_tell_peak_and_moment():
    need = estimate("tiny", precision="fp32")
    shown = figures.against_card({"tiny": need}, card=2**30, card_name="a card", title="t")
    assert need.moment in shown.alt and "a card of 1.0 GiB" in shown.alt


def test_bars_are_the_parts_of_the_estimate():
    need = estimate("llama-3.1-8b")
    figure, _ = draw_against_card({"8B": need}, card=80 * 2**30, card_name="80", title="t")
    widths = [patch.get_width() * 2**30 for patch in figure.axes[0].patches[:6]]
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    assert widths == pytest.approx([getattr(need, part) for part in parts])


def test_reserved_is_drawn_above_allocated():
    moments = replay([(True, 0, 3 * MIB), (False, 0, 0)]).timeline
    shown = figures.reserved_and_allocated(moments, title="t", note="simulated")
    assert "at most 3 MiB allocated, 20 MiB reserved" in shown.alt and "simulated" in shown.alt


def test_segments_tell_used_and_free():
    done = replay([(True, 0, 20 * MIB), (True, 1, 20 * MIB), (False, 0, 0)])
    shown = figures.segments({"now": done.segments}, title="t", note="simulated")
    assert "20 MiB in use" in shown.alt and "20 MiB free" in shown.alt


@pytest.mark.parametrize(
    "draw",
    [
        lambda: figures.memory_over_time([(0, 0)], floors={}, phases={}),
        lambda: figures.against_card({}, card=1, card_name="c", title="t"),
        lambda: figures.reserved_and_allocated([], title="t", note="n"),
        lambda: figures.segments({}, title="t", note="n"),
    ],
)
def test_nothing_to_draw_is_a_sentence(draw):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw()
