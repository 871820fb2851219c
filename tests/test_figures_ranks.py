"""All ranks side by side: every rank has its line and its words, and what cannot be drawn is a sentence."""

import math

import pytest

from course_lib.figures.ranks import side_by_side
from course_lib.observe.tracking import Tracker

FIVE = ("loss", "tokens_per_second", "memory_bytes", "gradient_norm", "heartbeat_gap")


def runs(ranks: int) -> dict:
    return {
        rank: {name: [(step, (rank + 1) * 2.0**30 / (step + 1), 0.0) for step in range(9)] for name in FIVE}
        for rank in range(ranks)
    }


def test_the_words_tell_each_ranks_last_number_of_each_metric():
    drawn = side_by_side(runs(3) | {3: {"loss": [(0, 2.5, 0.0)]}}, title="Four ranks")
    assert drawn.alt.startswith("Four ranks, 4 ranks")
    assert "memory (GiB): rank 0 0.1111, rank 1 0.2222, rank 2 0.3333, rank 3 nothing" in drawn.alt
    assert "rank 3 2.5" in drawn.alt and "heartbeat gap (s)" in drawn.alt
    assert len(drawn.data) < 40_000


def test_a_folder_is_read_and_metrics_can_be_chosen(tmp_path):
    for rank in (0, 1):
        with Tracker(tmp_path, rank=rank, world_size=2) as tracker:
            tracker.log(1, loss=rank + 1.0, learning_rate=0.25)
            tracker.log(2, loss=math.nan, learning_rate=0.5)
    assert "learning_rate: rank 0 0.5, rank 1 0.5." in side_by_side(tmp_path, metrics=["learning_rate"]).alt


@pytest.mark.parametrize("given", [{}, {0: {}}, {0: {"other": [(1, 1.0, 0.0)]}}])
def test_nothing_to_draw_is_a_sentence(given):
    with pytest.raises(ValueError, match="no rank logged any"):
        side_by_side(given)


def test_a_metric_that_nobody_logged_is_named():
    with pytest.raises(ValueError, match="speed: no rank logged it. Logged: gradient_norm"):
        side_by_side(runs(1), metrics=["speed"])
