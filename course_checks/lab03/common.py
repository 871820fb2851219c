"""What the checks of lab 3 share: the lab itself, a launch that reads a hang, and words for wrong sums and traffic."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import Lab, NotYet, run_ranks
from course_checks.lab03.hangs import by_rank
from course_checks.lab03.wire import Message
from course_lib.launch import RanksHung

lab = Lab("03_collectives", title="How ranks talk")

TIMEOUT = 4.0  # seconds; the longest of these programs takes a tenth of it on two busy cores
_OUTSIDE = re.compile(r"waits? in barrier \(a library, with no line of yours on the stack\)")


def run(program: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    """What ``program`` returns on each rank.

    Raises:
        NotYet: the learner's code hangs.
    """
    try:
        return run_ranks(program, *args, ranks=ranks, timeout=TIMEOUT).results
    except RanksHung as hung:
        raise NotYet(_why_hung(str(hung), ranks)) from hung


def _why_hung(report: str, ranks: int) -> str:
    lines = by_rank(report, ranks)
    if all(line.startswith("waits in send") for line in lines):
        return (
            "every rank sends first: a send may block until it is received, and nobody has come to receiving. Post the "
            f"receive first (irecv), or start both together (batch_isend_irecv). {report}"
        )
    if all(line.startswith("waits in recv") for line in lines):
        return f"every rank receives first, and so nobody sends: post the receive with irecv, then send. {report}"
    return f"it hangs: {_OUTSIDE.sub('returned from your function', report)}"


def sent(messages: list[Message]) -> list[Message]:
    """The messages with something in them that this rank sent."""
    return [message for message in messages if message.kind == "send" and message.bytes]


def only_messages(told: list[dict[str, Any]], exercise: str) -> None:
    """Raise NotYet where a collective of the library was called: send and receive are the material."""
    for rank, outcome in enumerate(told):
        kinds = {message.kind for message in outcome["messages"]} - {"send", "recv"}
        if kinds:
            raise NotYet(
                f"rank {rank} calls the library's {min(kinds)}: build {exercise} from send and receive, that is the exercise"
            )


def factor(got: torch.Tensor, expected: torch.Tensor) -> float | None:
    """The k with got = k * expected everywhere; None where there is none, or it is 1."""
    got, expected = got.double(), expected.double()
    if not expected.numel() or not got.any():
        return None
    k = float(got.sum() / expected.sum())
    same = torch.allclose(got, k * expected, rtol=1e-4, atol=1e-6)
    return k if same and abs(k - 1) > 1e-6 else None


def scaled(gots: list[torch.Tensor], expecteds: list[torch.Tensor], ranks: int) -> None:
    """Raise NotYet where all ranks have the sum times one and the same factor."""
    factors = [factor(got, expected) for got, expected in zip(gots, expecteds, strict=True)]
    k = factors[0]
    if k is None or any(each is None or abs(each / k - 1) > 1e-3 for each in factors):
        return
    if ranks > 1 and abs(k * ranks - 1) < 1e-3:
        raise NotYet(
            f"on {ranks} ranks your sum is divided by {ranks}: that is the mean; who wants it divides afterwards"
        )
    if ranks > 1 and abs(k / ranks - 1) < 1e-3:
        raise NotYet(
            f"on {ranks} ranks your sum is {ranks} times too large: chunks that were summed are added up again"
        )
    raise NotYet(f"on {ranks} ranks your sum is scaled by {k:.4g}: every rank's values count once")


def named(ranks: list[int]) -> str:
    """``rank 1``, ``ranks 1 and 3``."""
    words = [str(rank) for rank in ranks]
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"
