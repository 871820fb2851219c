"""Published peaks of GPU memory: the constants that were fitted to some of them, and what the others say of the estimate."""

from __future__ import annotations

import statistics

from benchmarks.memory import fitted_waste, peaks, said_to_fit
from course_lib.memory.breakdown import EXPECTED_WASTE, HALF_WITHIN, HELD_OUT, NINE_OF_TEN_WITHIN

ALL = peaks()
SEEN, UNSEEN = (
    [peak for peak in ALL if peak.row["peak_gib"] and peak.row["held_out"] is held] for held in (False, True)
)


def test_the_rows_say_where_they_come_from() -> None:
    for row in (peak.row for peak in ALL):
        assert all(row[name] for name in ("id", "source", "url", "place", "date", "group", "model", "card_gib")), row[
            "id"
        ]
    assert len({peak.row["id"] for peak in ALL}) == len(ALL)


def test_what_was_fitted_is_what_the_seen_rows_give() -> None:
    assert EXPECTED_WASTE == round(fitted_waste(), 2)
    assert statistics.median(abs(peak.error) for peak in SEEN) < 0.08


def test_the_estimate_says_how_sure_it_is_from_the_rows_that_were_held_out() -> None:
    errors = sorted(abs(peak.error) for peak in UNSEEN)
    assert len(errors) == HELD_OUT
    assert round(statistics.median(errors), 2) == HALF_WITHIN
    assert round(errors[int(0.9 * (len(errors) - 1))], 2) == NINE_OF_TEN_WITHIN


def test_no_run_is_said_to_fit_that_did_not() -> None:
    refused = [peak for peak in ALL if peak.row["peak_gib"] is None]
    assert len(refused) >= 5
    assert not [peak.row["id"] for peak in refused if said_to_fit(peak)]
