"""A rank's collectives between two barriers, for the checks of every lab that counts them."""

from __future__ import annotations

from course_lib.launch import Run
from course_lib.observe import Collective


def phases(run: Run, rank: int) -> list[list[Collective]]:
    """A rank's collectives cut at its barriers."""
    cut: list[list[Collective]] = [[]]
    for collective in run.collectives:
        if collective.rank == rank:
            if collective.kind == "barrier":
                cut.append([])
            else:
                cut[-1].append(collective)
    return cut
