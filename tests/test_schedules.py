"""Pipeline schedules: complete, able to run, idle for as long as the formulas say; planted mistakes are named."""

from __future__ import annotations

import pytest
from refusals import assert_refused

from course_lib.choices import SCHEDULES
from course_lib.parallel.schedules import Action, ideal_bubble, orders
from course_lib.parallel.simulate import simulate, timeline

SIZES = [(stages, micro_batches) for stages in (1, 2, 3, 4, 6) for micro_batches in (1, 2, 4, 6, 12)]


def cases(schedule):
    if schedule != "interleaved":
        return [(*size, 1) for size in SIZES]
    return [(stages, m, chunks) for stages, m in SIZES for chunks in (2, 3) if m % stages == 0]


def short(order):
    return " ".join(kind + str(i) + "'" * chunk for kind, i, chunk in order)


def changed(order, *, drop=(), add=(), swap=()):
    """An order with its actions at `drop` left out, `add` put at the end, those at `swap` exchanged."""
    order = list(order)
    for a, b in zip(swap[::2], swap[1::2], strict=True):
        order[a], order[b] = order[b], order[a]
    return [action for i, action in enumerate(order) if i not in drop] + list(add)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_and_idles_as_its_formula_says(schedule):
    for stages, micro_batches, chunks in cases(schedule):
        case = (stages, micro_batches, chunks)
        made = orders(schedule, *case)
        kinds = "FBW" if schedule == "zero_bubble" else "FB"
        every = sorted(Action(kind, i, c) for kind in kinds for i in range(micro_batches) for c in range(chunks))
        assert [sorted(order) for order in made] == [every] * stages, case
        ran = simulate(made, forward=1.0, backward=1.0, weight=1.0)
        assert ran.bubble == pytest.approx(ideal_bubble(schedule, *case), abs=1e-12), case
        assert timeline(ran.events) == ran, case
        # an oracle that knows the dependencies and nothing of the simulator
        ends = {(e.kind, e.micro_batch, e.chunk * stages + e.rank): e.end for e in ran.events}
        for event in ran.events:
            stage = event.chunk * stages + event.rank
            before = {"F": ("F", stage - 1), "B": ("B", stage + 1), "W": ("B", stage)}[event.kind]
            if 0 <= before[1] < stages * chunks:
                assert event.start >= ends[before[0], event.micro_batch, before[1]], case
            assert event.kind == "F" or event.start >= ends["F", event.micro_batch, stage], case
        for rank in range(stages):
            own = [event for event in ran.events if event.rank == rank]
            assert [Action(*event[1:4]) for event in own] == made[rank], case
            assert all(a.end <= b.start for a, b in zip(own, own[1:], strict=False)), case


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_hold_as_many_micro_batches_as_the_papers_say(schedule):
    for stages, m, chunks in cases(schedule):
        held = simulate(orders(schedule, stages, m, chunks)).in_flight
        for rank in range(stages):
            ahead = 2 * (stages - 1 - rank) + (chunks - 1) * stages
            expected = {
                "naive": 1,
                "gpipe": m,
                "1f1b": min(stages - rank, m),
                "interleaved": min(ahead + 1, m * chunks) / chunks,
                "zero_bubble": min(stages, m),  # as much as 1F1B's first rank, on every rank
            }[schedule]
            assert held[rank] == expected, (stages, m, chunks, rank)


def test_orders_are_those_of_the_papers_figures():
    for arguments, expected in [
        (("1f1b", 3, 4), ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        (("gpipe", 2, 3), ["F0 F1 F2 B0 B1 B2"] * 2),
        (("naive", 2, 2), ["F0 B0 F1 B1"] * 2),
        (
            ("interleaved", 2, 4, 2),
            [
                "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
                "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
            ],
        ),
        (("zero_bubble", 2, 3), ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]),
    ]:
        assert [short(order) for order in orders(*arguments)] == expected, arguments


def test_times_add_up_by_hand():
    result = simulate(orders("naive", 3, 2), forward=1.0, backward=2.0, send=0.25)
    assert result.seconds == 2 * (3 * 3 + 4 * 0.25)
    split = simulate(orders("zero_bubble", 4, 8), forward=2.0, backward=2.0, weight=1.0)
    assert split.seconds == 8 * 5.0 + 3 * (2.0 + 2.0 - 1.0)  # ZB-H1: (p - 1) (F + B - W) idle
    assert simulate(orders("interleaved", 1, 2, 2), send=9.0).bubble == 0.0  # a rank sends nothing to itself


GOOD = orders("1f1b", 3, 4)
SPLIT = orders("zero_bubble", 2, 3)
MISTAKES = [  # orders, the rank and what it does wrong
    ([GOOD[0], changed(GOOD[1], drop=[7]), GOOD[2]], "rank 1 never"),
    ([SPLIT[0], changed(SPLIT[1], drop=[8])], "rank 1 never"),
    ([changed(GOOD[0], add=[Action("F", 1)]), *GOOD[1:]], "micro-batch 1 twice"),
    ([GOOD[0], GOOD[1], changed(GOOD[2], swap=[0, 1])], "comes later"),  # in its own order
    ([changed(GOOD[0], swap=[1, 3]), *GOOD[1:]], "is stuck"),  # B0 before F1, which rank 1 runs before its own B0
    ([SPLIT[0], changed(SPLIT[1], swap=[1, 4])], "rank 1 is"),
    ([["F0"]], "'F0'"),
    ([[("F", -1)]], "('F', -1)"),
    ([], "nothing"),
]


def test_mistakes_and_misfits_are_named():
    assert_refused((lambda made=made: simulate(made), ValueError, fragment) for made, fragment in MISTAKES)
    assert_refused(
        [
            (lambda: orders("1fb1", 4, 8), ValueError, "'1f1b'"),
            (lambda: orders("gpipe", 4, 8, 2), ValueError, "'interleaved'"),
            (lambda: orders("interleaved", 4, 8), ValueError, "at least 2"),
            (lambda: orders("interleaved", 4, 9, 2), ValueError, "12"),
        ]
    )
