"""Lab 3, exercise 7: from what each rank waits in to the rank that never came, and why."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

from course_checks.harness import NotYet, returned
from course_checks.lab03 import hangs
from course_checks.lab03.common import lab

CAUSES = {
    "order": "waits in another collective than the others: it makes the same calls in another order",
    "branch": "is at work in a line of its own, inside `if rank == 0`, while the others wait for it",
    "left": "has returned: it made fewer calls than the others",
    "shapes": "waits for a message that nobody sends: its tensor has another shape, and so another number of pieces",
}


@lab.exercise("Who never came", importance=5, difficulty=2, minutes=20)
def diagnose(diagnose: Callable[..., Any]) -> str:
    """Four hangs provoked on real ranks, each read again with the ranks renumbered and with more of them."""
    for cause, lines in hangs.provoked().items():
        for stacks, culprit in _renumbered(lines, hangs.CULPRITS[cause]):
            answer = returned(diagnose(list(stacks)), (tuple, list), "the diagnosis")
            _right(answer, stacks, culprit, cause)
    return f"{len(CAUSES)} real hangs, each with the ranks in every order and with five of them"


def _renumbered(lines: list[str], culprit: int) -> list[tuple[list[str], int]]:
    others = [rank for rank in range(len(lines)) if rank != culprit]
    orders = list(permutations(range(len(lines)))) + [(others[0], culprit, others[1], others[0], others[0])]
    return [([lines[rank] for rank in order], order.index(culprit)) for order in orders]


def _right(answer: Any, stacks: list[str], culprit: int, cause: str) -> None:
    shown = "; ".join(f"rank {rank} {line}" for rank, line in enumerate(stacks))
    if len(answer) != 2 or not isinstance(answer[0], int) or not isinstance(answer[1], str):
        raise NotYet(f"the diagnosis should be (rank, cause), a whole number and a word, and is {answer!r}")
    rank, reason = answer
    if reason not in CAUSES:
        raise NotYet(f"{reason!r} is none of the causes {', '.join(CAUSES)}")
    if not 0 <= rank < len(stacks):
        raise NotYet(f"there is no rank {rank} among {len(stacks)} ranks: {shown}")
    if rank != culprit:
        raise NotYet(
            f"you name rank {rank}, which waits where it should: look for the rank whose line differs from the others'. {shown}"
        )
    if reason != cause:
        raise NotYet(f"the rank is right, the cause is not {reason!r}: rank {culprit} {CAUSES[cause]}. {shown}")
