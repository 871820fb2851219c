"""Lab 3's checks: planted wrong answers get their words, a right answer written another way passes, a stub is no try."""

import pytest
import torch
import torch.distributed as dist
from planted import lab03 as planted
from planted.contract import Contract

from course_checks.lab03 import common, cost, hangs, lab
from course_checks.lab03.wire import messages_sent
from course_lib.launch import launch


@pytest.fixture(scope="module", autouse=True)
def warm_ranks():
    """The first launch of a session imports PyTorch, and the four hangs are provoked once; a check's time is taken warm."""
    launch(float, ranks=1, quiet=True)


class TestChecks(Contract):
    lab, planted = lab, planted


def _seen_on_the_wire():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([1, 2])
    with messages_sent() as messages:
        incoming = dist.irecv(torch.empty(5), (rank - 1) % ranks)
        dist.isend(torch.ones(5), (rank + 1) % ranks).wait()
        incoming.wait()
        if rank == 1:
            dist.send(torch.ones(3, dtype=torch.float64), 2, group=pair)
        if rank == 2:
            dist.recv(torch.ones(3, dtype=torch.float64), 1, group=pair)
        dist.all_reduce(torch.ones(2))
    return messages


def test_the_wire_sees_messages_with_their_global_peers():
    seen = launch(_seen_on_the_wire, ranks=3, quiet=True).results
    assert seen[0] == [("recv", 2, 20), ("send", 1, 20), ("all_reduce", -1, 8)]
    assert seen[1] == [("recv", 0, 20), ("send", 2, 20), ("send", 2, 24), ("all_reduce", -1, 8)]
    assert seen[2] == [("recv", 1, 20), ("send", 0, 20), ("recv", 1, 24), ("all_reduce", -1, 8)]


def test_the_model_of_mistakes_without_a_mistake_is_the_room_of_links():
    for case in cost.CASES:
        assert cost._mistaken(case, ()) == pytest.approx(cost._expected(case), rel=1e-12)


def test_no_two_mistakes_of_a_cost_look_alike():
    for at in (0, 1):
        outcomes = {name: tuple(cost._mistaken(case, (name,))[at] for case in cost.CASES) for name in cost.MISTAKES}
        kept = {
            name: told for name, told in outcomes.items() if told != tuple(cost._expected(c)[at] for c in cost.CASES)
        }
        assert len(set(kept.values())) == len(kept)


@pytest.mark.parametrize(
    ("report", "lines"),
    [
        (
            "no result after 1 s. ranks 0-1, 3 wait in all_reduce (train.py, line 3: `a; b`);\nrank 2 never got there: it is "
            "in train.py, line 9: `work()`.",
            ["waits in all_reduce (train.py, line 3: `a; b`)"] * 2
            + ["is in train.py, line 9: `work()`", "waits in all_reduce (train.py, line 3: `a; b`)"],
        ),
        (
            "no result after 1 s. rank 1 waits in recv (cell [3], line 2);\nranks 0, 2 never got there: the function has "
            "returned.",
            ["has returned", "waits in recv (cell [3], line 2)", "has returned"],
        ),
        (
            "ranks 0, 2 waited in all_reduce (train.py, line 3: `x`); rank 1 never got there: the function had already "
            "returned. Every rank must make the same collective calls in the same order.",
            [
                "waits in all_reduce (train.py, line 3: `x`)",
                "has returned",
                "waits in all_reduce (train.py, line 3: `x`)",
            ],
        ),
    ],
)
def test_a_report_read_rank_by_rank(report, lines):
    assert hangs.by_rank(report, len(lines)) == lines


SENDS, RECEIVES = "wait in send (cell [3], line 2: `dist.send(a); b`)", "wait in recv (cell [3], line 5)"


@pytest.mark.parametrize(
    ("report", "ranks", "words"),
    [
        (f"no result after 4 s. ranks 0-3 {SENDS}.", 4, "every rank sends first"),
        (
            f"no result after 4 s. ranks 0, 2 {SENDS};\nrank 1 waits in send (cell [3], line 9).",
            3,
            "every rank sends first",
        ),
        (f"no result after 4 s. ranks 0, 1 {RECEIVES}.", 2, "every rank receives first"),
        (f"no result after 4 s. ranks 0, 1 {SENDS};\nranks 2, 3 {RECEIVES}.", 4, "it hangs: no result"),
        (
            f"no result after 4 s. ranks 0-2 {RECEIVES};\nrank 3 waits in barrier (a library, with no line of yours on the "
            "stack).",
            4,
            "rank 3 returned from your function",
        ),
    ],
)
def test_a_hang_in_words(report, ranks, words):
    assert words in common._why_hung(report, ranks)
