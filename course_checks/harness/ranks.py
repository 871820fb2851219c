"""Running a learner's code on ranks, and reading what the ranks sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from course_checks.harness.comparing import NotYet
from course_checks.harness.guard import without_limit
from course_lib.launch import RankFailed, Run, launch
from course_lib.launch.rank import PEER_LOST

if TYPE_CHECKING:
    from course_lib.observe import Collective

TIMEOUT = 15.0  # seconds; the longest of the programs takes a second on two quiet cores, ten on busy ones


def run_ranks(program: Callable[..., Any], *args: Any, ranks: int, timeout: float = TIMEOUT) -> Run:
    """Run `program` on gloo ranks of one thread each.

    Raises:
        NotYet: the ranks did not come to the same collectives with tensors of the same size.
    """
    try:
        with without_limit():
            return launch(program, *args, ranks=ranks, timeout=timeout, backend="gloo", threads=1, quiet=True)
    except RankFailed as failed:
        message = failed.cause_message.lower()
        if failed.cause_type == "SIGABRT" or "invalid tensor size" in message:
            raise NotYet(
                f"rank {failed.rank} of {ranks} was ended by gloo: the ranks come to a collective with tensors of different "
                "lengths, or a message came that is longer than the tensor that should take it. What one rank sends and another "
                "takes must have the same size on every rank: pad what does not divide, and give every parameter its place on "
                "every rank, also one that has no .grad there"
            ) from failed
        if any(sign in message for sign in PEER_LOST):
            raise NotYet(
                f"rank {failed.rank} of {ranks} waits for a rank that has ended: every rank must make the same collective "
                f"calls in the same order. {' '.join(str(failed).split())[:300]}"
            ) from failed
        raise


def phases(run: Run, rank: int) -> list[list[Collective]]:
    """A rank's collectives, cut at its barriers."""
    cut: list[list[Collective]] = [[]]
    for collective in run.collectives:
        if collective.rank == rank:
            if collective.kind == "barrier":
                cut.append([])
            else:
                cut[-1].append(collective)
    return cut


def on_link(collective: Collective) -> float:
    """Bytes that a rank sends for it: `wire_bytes`, and all of what has no ring's formula, a broadcast for instance."""
    if collective.kind in ("recv", "barrier") or len(collective.group) == 1:
        return 0.0
    return collective.wire_bytes or collective.bytes
