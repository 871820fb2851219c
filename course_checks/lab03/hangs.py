"""Hangs, provoked on real ranks, and what each rank was doing: the lines that a report of ``launch`` has, rank by rank."""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_lib.launch import RankFailed, RanksHung, launch

RANKS = 3
CULPRITS = {"order": 2, "branch": 0, "left": 1, "shapes": 1}
_PROGRAMS = {"order": "another_order", "branch": "own_branch", "left": "left_early", "shapes": "other_shape"}
_SHOWS = {  # what the culprit's line begins with when the ranks had the time to get into their hang
    "order": "waits in broadcast",
    "branch": "is in",
    "left": "has returned",
    "shapes": "waits in recv",
}
_PATIENCE = (0.7, 2.0, 5.0)  # seconds until a hang is one; more on a machine too busy to get there
_NAME = "train.py"


@functools.cache
def provoked() -> dict[str, list[str]]:
    """Cause -> one line for each rank, like ``waits in all_reduce (train.py, line 16: `dist.all_reduce(gradient)`)``.

    Takes a few seconds once a session: each program is run until it hangs.
    """
    programs = _programs()
    return {cause: _provoke(cause, programs[name]) for cause, name in _PROGRAMS.items()}


def show() -> None:
    """Print the four hangs, one line a rank."""
    for number, lines in enumerate(provoked().values(), 1):
        print(f"hang {number}")
        for rank, line in enumerate(lines):
            print(f"  stacks[{rank}] = {line!r}")


def _programs() -> dict[str, Callable[[], None]]:
    """The programs as if the learner had written them: a report leaves the course's own lines out."""
    source = Path(__file__).with_name("broken_programs.py").read_text(encoding="utf-8")
    linecache.cache[_NAME] = (len(source), None, source.splitlines(keepends=True), _NAME)
    namespace: dict[str, Any] = {"__name__": "train"}
    exec(compile(source, _NAME, "exec"), namespace)
    return namespace


def _provoke(cause: str, program: Callable[[], None]) -> list[str]:
    lines: list[str] = []
    for patience in _PATIENCE:
        try:
            launch(program, ranks=RANKS, timeout=patience, backend="gloo", threads=1, quiet=True)
        except (RanksHung, RankFailed) as error:
            lines = by_rank(str(error), RANKS)
        if lines and lines[CULPRITS[cause]].startswith(_SHOWS[cause]) and sum(map(_waits, lines)) >= RANKS - 1:
            return lines
    raise RuntimeError(f"the program {cause!r} did not hang as it should on this machine: {lines}")


def _waits(line: str) -> bool:
    return line.startswith("waits in")


def by_rank(report: str, ranks: int) -> list[str]:
    """One line for each rank of the report of RanksHung, or of RankFailed where peers were left alone."""
    lines = [""] * ranks
    report = re.split(r"\n\n|\nRanks called ", report)[0]  # what they printed, and sizes that differ, come after it
    for part in re.finditer(
        r"(?:^|\. |;\s)ranks? ([\d, -]+) (.+?)(?=;\s(?:rank|$)|\. Every rank|\.?$)", report, re.DOTALL
    ):
        says = part[2].removeprefix("never got there: ").replace("the function has returned", "has returned")
        says = re.sub(r"^(?:the function had|they have|has) (?:already )?returned", "has returned", says)
        says = re.sub(r"^wait(?:s|ed)? in", "waits in", says)
        says = re.sub(r"^(?:it is|they are|are|is) in ", "is in ", says)
        for piece in part[1].split(","):
            first, _, last = piece.strip().partition("-")
            for rank in range(int(first), int(last or first) + 1):
                lines[rank] = says
    return lines
