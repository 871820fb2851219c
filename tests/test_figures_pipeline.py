"""A pipeline's picture tells both bubbles, marks each kind of action, and refuses what cannot be drawn."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from course_lib.figures import pipeline as pictures
from course_lib.parallel.schedules import orders
from course_lib.parallel.simulate import simulate


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were made, to look into."""
    made: list[Figure] = []
    make = pictures.new_figure

    def keep(*args, **kwargs):
        figure, axes = make(*args, **kwargs)
        made.append(figure)
        return figure, axes

    monkeypatch.setattr(pictures, "new_figure", keep)
    return made


def lines(schedule, stages, micro_batches, chunks=1, **times):
    return simulate(orders(schedule, stages, micro_batches, chunks), **times)


def test_the_real_run_stands_above_the_ideal_one_with_both_bubbles(drawn):
    real = lines("1f1b", 2, 4, forward=0.01, backward=0.02, send=0.002)
    picture = pictures.schedule(real, lines("1f1b", 2, 4, forward=0.5, backward=1.0), title="mine")
    assert (
        f"idles {real.bubble:.1%} of the time, the ideal schedule 20.0%" in picture.alt
        and "4 micro-batches" in picture.alt
    )
    above, below = drawn[0].axes
    assert f"real run: {real.bubble:.1%} idle" in above.get_title() and below.get_title() == "ideal: 20.0% idle"
    assert below.get_xlim()[1] == pytest.approx(15, rel=0.01)  # 5 forwards and backwards of length 1 and 2
    assert above.get_xlim()[1] == pytest.approx(real.seconds * 1e3, rel=0.01)
    assert sorted(text.get_text() for text in below.texts) == sorted("0123" * 2 * 2)
    hatches = {box.get_hatch() for box in below.collections}
    assert hatches >= {pictures.KINDS["B"][1]} and pictures.KINDS["W"][1] not in hatches
    assert {text.get_text() for text in drawn[0].legends[0].texts} == {"forward", "backward", "idle"}


def test_weights_and_chunks_look_different_in_grey(drawn):
    split, parts = lines("zero_bubble", 2, 2, backward=1.0, weight=1.0), lines("interleaved", 2, 2, 2)
    pictures.schedule(split, split, title="split")
    pictures.schedule(parts, parts, title="parts")
    assert {pictures.KINDS[kind][1] for kind in "BW"} <= {box.get_hatch() for box in drawn[0].axes[0].collections}
    assert "backward for weights" in {text.get_text() for text in drawn[0].legends[0].texts}
    assert "chunk 1: paler" in {text.get_text() for text in drawn[1].legends[0].texts}
    assert len({kind[1] for kind in pictures.KINDS.values()}) == 3


def test_several_schedules_stand_below_each_other(drawn):
    pairs = {name: (lines(name, 2, 4, send=0.1), lines(name, 2, 4)) for name in ("naive", "gpipe", "zero_bubble")}
    alt = pictures.schedules(pairs, title="all").alt
    titles = [axis.get_title(loc="left") for axis in drawn[0].axes]
    assert len(titles) == 6 and titles[0].startswith("naive, real run") and titles[3] == "gpipe, ideal: 20% idle"
    assert f"naive idles {pairs['naive'][0].bubble:.1%} in the real run and 50.0% in the ideal" in alt
    assert not any(axis.texts for axis in drawn[0].axes)
    with pytest.raises(ValueError, match="at least one schedule"):
        pictures.schedules({}, title="none")


def test_what_stages_hold_is_told_bar_by_bar(drawn):
    alt = pictures.in_flight({"gpipe": [8, 8], "1f1b": [2, 1]}, title="held").alt
    assert "gpipe: 8, 8; 1f1b: 2, 1" in alt
    assert [bar.get_height() for bars in drawn[0].axes[0].containers for bar in bars] == [8, 8, 2, 1]
    assert "1f1b: 2.00 MiB, 1.00 MiB" in pictures.in_flight({"1f1b": [2**21, 2**20]}, title="held", in_bytes=True).alt


@pytest.mark.parametrize(
    "draw",
    [
        lambda: pictures.schedule(lines("1f1b", 2, 4), lines("1f1b", 3, 4), title="t"),
        lambda: pictures.in_flight({}, title="t"),
        lambda: pictures.in_flight({"a": [1, 2], "b": [1]}, title="t"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(draw):
    with pytest.raises(ValueError):
        draw()
