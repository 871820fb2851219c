"""What the checks of lab 3 share: the lab itself, numbers whose sums are exact, and one call on a rank, watched."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from course_checks.harness import Contract, Lab, NotYet, run_ranks
from course_lib.launch import RankFailed, RanksHung
from course_lib.observe.collectives import Collective, record_collectives

lab = Lab("03_collectives", title="How ranks talk")

LATE, TIMEOUT = 0.03, 8.0  # seconds; the longest of these programs takes half a second
LIBRARY = "waits? in barrier \\(a library, with no line of yours on the stack\\)"
ITEM = 4  # bytes of a float32


class Seen(NamedTuple):
    """What a call gave back, and the collectives that this rank issued in it."""

    result: Any
    issued: list[Collective]

    @property
    def sends(self) -> list[Collective]:
        """The messages with something in them."""
        return [c for c in self.issued if c.kind == "send" and c.bytes]


def values(size: int, seed: int, rank: int) -> torch.Tensor:
    """Quarters of whole numbers: a sum over 8 ranks is exact in float32 in any order, and not in fewer bits."""
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + seed)
    return torch.randint(1, 2_000_000, (size,), generator=generator) / 4


def watched(call: Callable[[], Any], late: int) -> Seen:
    """Call with all ranks at the start, but for one that is late: who does not wait reads what has not come yet."""
    dist.barrier()
    if dist.get_rank() == late % dist.get_world_size():
        time.sleep(LATE)
    with record_collectives() as issued:
        result = call()
        kept = result.clone() if isinstance(result, torch.Tensor) else result
    dist.barrier()
    return Seen(kept, list(issued))


def in_your_words(hung: RanksHung) -> str:
    """The report, without the check's own barrier."""
    return re.sub(LIBRARY, "returned from your function", str(hung)).rstrip(".")


class Hung(NotYet):
    """The ranks did not come to an end."""


def run(program: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    """What `program` returns on each rank. Raises Hung in the learner's words: the check's own barrier is none of theirs."""
    try:
        return run_ranks(program, *args, ranks=ranks, timeout=TIMEOUT).results
    except RanksHung as hung:
        report = in_your_words(hung)
        unwaited = ". Did a rank return before its messages were through? wait() for each" * ("wait in" not in report)
        raise Hung(f"{report}{unwaited}") from None
    except RankFailed as failed:
        if "not connected" in failed.cause_message:
            raise NotYet(
                f"rank {failed.rank} sends to itself: what is its own needs no message ({failed.where})"
            ) from None
        raise


def by_messages(contract: Contract, seen: Seen) -> None:
    """Nothing but send and receive was called: they are the material."""
    others = sorted({c.kind for c in seen.issued} - {"send", "recv", "barrier"})
    contract.holds(not others, f"calls the library's {others and others[0]}: build it from send and receive")
