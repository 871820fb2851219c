"""Lab 4, exercise 6: one optimizer step where also the ranks have unequally many labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.lab04.accumulation import check
from course_checks.lab04.common import lab

UNEQUAL = (
    ([(3, 8, 24), (2, 10, 7)], [(2, 8, 3), (1, 8, 5)]),
    ([(2, 8, 0)], [(2, 8, 16), (2, 8, 9)], [(1, 8, 0), (3, 6, 1), (4, 8, 30)]),  # rank 0 has no label at all
)


@lab.exercise("Stretch: uneven ranks", importance=4, difficulty=3, minutes=15)
def uneven_step(step: Callable[..., Any]) -> str:
    """The same where ranks have unequally many labels, or none."""
    return check(step, UNEQUAL)
