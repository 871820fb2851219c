"""Lab 3: its checks against the planted answers, and hangs read rank by rank."""

from planted import lab03 as planted
from planted.contract import Contract

from course_checks.lab03 import common, hangs, lab


class TestChecks(Contract):
    lab, planted = lab, planted


def test_a_report_is_read_rank_by_rank():
    waits = "waits in all_reduce (train.py, line 3: `a; b`)"
    hung = (
        "no result after 1 s. ranks 0-1, 3 wait in all_reduce (train.py, line 3: `a; b`);\n"
        "rank 2 never got there: it is in train.py, line 9: `work()`."
    )
    assert hangs.by_rank(hung, 4) == [waits, waits, "is in train.py, line 9: `work()`", waits]
    left_alone = (
        "ranks 0, 2 waited in all_reduce (train.py, line 3: `a; b`); rank 1 never got there: the function had already "
        "returned. Every rank must make the same collective calls in the same order."
    )
    assert hangs.by_rank(left_alone, 3) == [waits, "has returned", waits]


def test_a_hang_has_words_for_its_cause():
    receives = "wait in recv (cell [3], line 5)"
    everyone = f"no result after 4 s. ranks 0, 1 {receives}."
    assert "receives first" in common._why_hung(everyone, 2)
    one_left = f"no result after 4 s. ranks 0-2 {receives};\nrank 3 waits in barrier (a library, with no line of yours on the stack)."
    assert "rank 3 returned" in common._why_hung(one_left, 4)
