"""Pipeline schedules: complete, in an order that can run, idle for as long as the formulas say; planted mistakes are named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from course_lib.choices import SCHEDULES
from course_lib.parallel.schedules import Action, ideal_bubble, orders
from course_lib.parallel.simulate import peak_held, simulate, timeline

CASES = [
    (schedule, stages, micro_batches, chunks)
    for schedule in SCHEDULES
    for stages in (1, 2, 3, 4, 6)
    for micro_batches in (1, 2, 3, 4, 6, 8, 12)
    for chunks in ((2, 3) if schedule == "interleaved" else (1,))
    if schedule != "interleaved" or micro_batches % stages == 0
]


def short(order):
    return " ".join(kind + str(i) + "'" * chunk for kind, i, chunk in order)


def changed(order, *, drop=(), add=(), swap=()):
    """An order with its actions at `drop` left out, `add` put at the end, those at `swap` exchanged."""
    order = list(order)
    for a, b in zip(swap[::2], swap[1::2], strict=True):
        order[a], order[b] = order[b], order[a]
    return [action for i, action in enumerate(order) if i not in drop] + list(add)


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "chunks"), CASES)
def test_every_schedule_runs_and_idles_as_its_formula_says(schedule, stages, micro_batches, chunks):
    made = orders(schedule, stages, micro_batches, chunks)
    kinds = "FBW" if schedule == "zero_bubble" else "FB"
    every = sorted(Action(kind, i, c) for kind in kinds for i in range(micro_batches) for c in range(chunks))
    assert [sorted(order) for order in made] == [every] * stages
    ran = simulate(made, forward=1.0, backward=1.0, weight=1.0)
    assert ran.bubble == pytest.approx(ideal_bubble(schedule, stages, micro_batches, chunks), abs=1e-12)
    assert timeline(ran.events) == ran

    ends = {(e.kind, e.micro_batch, e.chunk * stages + e.rank): e.end for e in ran.events}
    last = stages * chunks - 1
    for event in ran.events:  # an oracle that knows the dependencies and nothing of the simulator
        stage = event.chunk * stages + event.rank
        before = {"F": ("F", stage - 1), "B": ("B", stage + 1), "W": ("B", stage)}[event.kind]
        if event.kind == "W" or 0 <= before[1] <= last:
            assert event.start >= ends[before[0], event.micro_batch, before[1]]
        assert event.kind == "F" or event.start >= ends["F", event.micro_batch, stage]
        assert event.end - event.start == (1.0 if event.kind == "F" or "W" in kinds else 2.0)
    for rank in range(stages):
        mine = [event for event in ran.events if event.rank == rank]
        assert [Action(*event[1:4]) for event in mine] == made[rank]
        assert all(a.end <= b.start for a, b in zip(mine, mine[1:], strict=False))


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "chunks"), CASES)
def test_ranks_hold_as_many_micro_batches_as_the_papers_say(schedule, stages, micro_batches, chunks):
    held = simulate(orders(schedule, stages, micro_batches, chunks)).in_flight
    m = micro_batches
    for rank in range(stages):
        ahead = 2 * (stages - 1 - rank) + (chunks - 1) * stages
        told = {
            "naive": 1,
            "gpipe": m,
            "1f1b": min(stages - rank, m),
            "interleaved": min(ahead + 1, m * chunks) / chunks,
            "zero_bubble": min(stages, m),  # as much as 1F1B's first rank, on every rank
        }[schedule]
        assert held[rank] == told


def test_orders_are_those_of_the_papers_figures():
    assert [short(order) for order in orders("1f1b", 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert short(orders("gpipe", 2, 3)[1]) == "F0 F1 F2 B0 B1 B2"
    assert short(orders("naive", 2, 2)[0]) == "F0 B0 F1 B1"
    assert [short(order) for order in orders("interleaved", 2, 4, 2)] == [
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
    ]
    assert [short(order) for order in orders("zero_bubble", 2, 3)] == [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]


def test_times_add_up_by_hand():
    one = simulate(orders("naive", 3, 2), forward=1.0, backward=2.0, send=0.25)
    assert one.seconds == 2 * (3 * 3 + 4 * 0.25)
    assert simulate(orders("1f1b", 2, 1), backward=1.5, weight=0.5).seconds == 6.0  # without W, B is the whole backward
    split = simulate(orders("zero_bubble", 4, 8), forward=2.0, backward=2.0, weight=1.0)
    assert split.seconds == 8 * 5.0 + 3 * (2.0 + 2.0 - 1.0)  # ZB-H1: (p - 1) (F + B - W) idle
    assert simulate(orders("interleaved", 1, 2, 2), send=9.0).bubble == 0.0  # a rank sends nothing to itself
    assert simulate([[], [Action("F", 0), Action("B", 0)]][1:]).in_flight == [1]


def test_a_limit_on_memory_is_kept_to_the_micro_batch():
    for schedule, limit in (("gpipe", 8), ("1f1b", 4), ("zero_bubble", 4)):
        made = orders(schedule, 4, 8)
        assert max(map(peak_held, made)) == limit
        simulate(made, memory_limit=limit)
        with pytest.raises(
            ValueError, match=f"rank 0 .*the forward of micro-batch {limit - 1}.*memory_limit is {limit - 1}"
        ):
            simulate(made, memory_limit=limit - 1)
    simulate(orders("interleaved", 4, 8, 2), memory_limit=5.5)
    with pytest.raises(ValueError, match="micro-batch 6: that makes 5.5 "):
        simulate(orders("interleaved", 4, 8, 2), memory_limit=5.4)


GOOD = orders("1f1b", 3, 4)
SPLIT = orders("zero_bubble", 2, 3)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([GOOD[0], changed(GOOD[1], drop=[7]), GOOD[2]], "rank 1 never runs the backward of micro-batch 3."),
        ([GOOD[0], GOOD[1], changed(GOOD[2], drop=[4])], "rank 2 never runs the forward of micro-batch 2."),
        ([SPLIT[0], changed(SPLIT[1], drop=[8])], "rank 1 never runs the backward for weights of micro-batch 2."),
        ([changed(GOOD[0], add=[Action("F", 1)]), *GOOD[1:]], "rank 0 runs the forward of micro-batch 1 twice."),
        ([GOOD[0], [], GOOD[2]], "rank 1 never runs the forward of micro-batch 0."),
        (
            [GOOD[0], GOOD[1], changed(GOOD[2], swap=[0, 1])],
            "rank 2 is to run the backward of micro-batch 0, but the forward of micro-batch 0 comes later in its own order",
        ),
        (
            [changed(GOOD[0], swap=[1, 3]), *GOOD[1:]],  # B0 before F1, which rank 1 runs before its own B0
            "rank 0 is to run the backward of micro-batch 0 and waits for the backward of micro-batch 0 on rank 1, which "
            "is stuck at the forward of micro-batch 1",
        ),
        ([SPLIT[0], changed(SPLIT[1], swap=[1, 4])], "rank 1 is to run the backward for weights of micro-batch 0,"),
        ([["F0"]], "rank 0: 'F0' is no action"),
        ([[("X", 0)]], r"rank 0: \('X', 0\) is no action"),
        ([[("F", -1)]], "is no action"),
        ([], "There is nothing to run"),
    ],
)
def test_a_mistake_is_named(made, said):
    with pytest.raises(ValueError, match=said):
        simulate(made)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: orders("1fb1", 4, 8), "did you mean '1f1b'"),
        (lambda: orders("Zero-Bubble", 4, 8), "did you mean 'zero_bubble'"),
        (lambda: ideal_bubble("dualpipe9", 4, 8), "Choose one of naive, gpipe, 1f1b, interleaved, zero_bubble"),
        (lambda: orders("gpipe", 0, 8), "stages=0"),
        (lambda: orders("gpipe", 4, 0), "num_microbatches=0"),
        (lambda: orders("gpipe", 4, 8, 2), "take schedule='interleaved'"),
        (lambda: orders("interleaved", 4, 8), "give at least 2"),
        (lambda: orders("interleaved", 4, 9, 2), "not a multiple of the 4 ranks.*take 12"),
        (lambda: simulate(GOOD, forward=-1.0), "forward=-1.0: give seconds"),
        (lambda: timeline([]), "There are no events"),
    ],
)
def test_bad_input_is_a_sentence(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_nothing_of_it_needs_torch():
    code = "import sys, course_lib.parallel.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
