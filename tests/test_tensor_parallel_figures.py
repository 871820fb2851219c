"""The pictures of the splits: drawn, described, small; and what cannot be drawn is refused."""

from __future__ import annotations

import pytest

from course_lib.figures import splits


def test_every_picture_says_what_it_shows():
    alt = splits.column_then_row().alt
    assert "at f: forward nothing, backward all-reduce" in alt and "at g: forward all-reduce, backward nothing" in alt
    assert "at f: forward all-gather, backward reduce-scatter" in splits.column_then_row(sequence_parallel=True).alt
    alt = splits.heads_over_ranks(heads=32, kv_heads=8, ranks=4).alt
    assert "4 of 32 query heads read each of 8 kv heads. Each of 4 ranks holds 8 query heads" in alt
    alt = splits.vocabulary_loss(tokens=1024, vocab=4096, ranks=4).alt
    assert "4.00 MiB on each" in alt and "each 4.00 KiB" in alt  # 1,024 x 4,096 / 4 logits of 4 bytes; 1,024 numbers
    alt = splits.inside_or_between(layers=6, ranks=3).alt
    assert "each rank holds 2 whole layers" in alt and "2 times in all" in alt


def test_pictures_stay_small_and_are_pngs():
    for picture in (splits.column_then_row(ranks=4), splits.heads_over_ranks(), splits.vocabulary_loss()):
        assert picture.data.startswith(b"\x89PNG") and 2_000 < len(picture.data) < 40_000


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: splits.column_then_row(ranks=5), "ranks=5: give a whole number from 2 to 4"),
        (lambda: splits.heads_over_ranks(heads=8, kv_heads=2, ranks=4), "ranks the kv heads"),
        (lambda: splits.heads_over_ranks(heads=6, kv_heads=4), "kv heads must divide the heads"),
        (lambda: splits.vocabulary_loss(tokens=0), "tokens=0"),
        (lambda: splits.inside_or_between(layers=5, ranks=2), "layers=5 do not divide"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
