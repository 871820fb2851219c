"""What the checks of lab 3 share: the lab itself, numbers whose sums are exact, and one call on a rank, watched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course_checks.harness import Contract, Lab, NotYet, run_ranks
from course_lib.launch import RankFailed, RanksHung
from course_lib.observe.collectives import Collective, record_collectives

lab = Lab("03_collectives", title="How ranks talk")

TIMEOUT, ITEM = 8.0, 4  # seconds; bytes of a float32
OUTSIDE = "Messages outside a batch run one after the other here, as they may with NCCL: try one batch_isend_irecv"
LENGTHS = "a message came that is no match, in length or dtype, for the tensor that should take it: which piece does a rank send, and which one does the next rank expect?"  # fmt: skip
LIBRARY = "waits? in barrier \\(a library, with no line of yours on the stack\\)"


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


class Handle:
    """What isend, irecv and a batch give back here; the message is through, and somebody should still ask."""

    def __init__(self, handles: list[Handle]) -> None:
        self.asked = False
        handles.append(self)

    def wait(self, *_: Any) -> bool:
        self.asked = True
        return True

    is_completed = wait


@contextmanager
def in_turn() -> Iterator[None]:
    """Play NCCL's rules: what a rank starts may run to its end before the next message or batch begins, and is to be waited for.

    A simulation: gloo, which carries these messages, has no such order.
    """
    handles: list[Handle] = []
    batching: list[bool] = []
    batch = distributed_c10d.batch_isend_irecv

    def alone(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            work = start(*args, **kwargs)
            if batching or work is None:
                return work
            work.wait()
            return Handle(handles)

        return started

    def together(operations: list[Any]) -> list[Any]:
        batching.append(True)
        try:
            works = batch(operations)
        finally:
            batching.clear()
        for work in works:
            work.wait()
        return [Handle(handles) for _ in works]

    changed = {"isend": alone(dist.isend), "irecv": alone(dist.irecv), "batch_isend_irecv": together}
    with patch.multiple(dist, **changed), patch.multiple(distributed_c10d, **changed):
        yield
    forgotten = sum(not handle.asked for handle in handles)
    if forgotten:
        raise NotYet(f"{forgotten} of {len(handles)} messages are never waited for: wait() on each of the handles")


def watched(call: Callable[[], Any]) -> Seen:
    """Call in step with the other ranks, under NCCL's rules."""
    dist.barrier()
    with record_collectives() as issued, in_turn():
        result = call()
    dist.barrier()
    return Seen(result, list(issued))


def in_your_words(hung: RanksHung) -> str:
    """The report, without the check's own barrier."""
    return re.sub(LIBRARY, "returned from your function", str(hung)).rstrip(".")


class Hung(NotYet):
    """The ranks did not come to an end."""


def run(program: Callable[..., Any], *args: Any, ranks: int, about: str = "") -> list[Any]:
    """What `program` returns on each rank."""
    try:
        return run_ranks(program, *args, ranks=ranks, timeout=TIMEOUT).results
    except RanksHung as hung:
        everyone = re.search(r"ranks 0-\d wait in (recv|send)", report := in_your_words(hung))
        raise Hung(f"{report}. {OUTSIDE}" if everyone else report) from None
    except NotYet as error:
        raise NotYet(about + LENGTHS if "ended by gloo" in str(error) else str(error)) from None
    except RankFailed as failed:
        if "not connected" not in failed.cause_message:
            raise
        to_itself = f"rank {failed.rank} sends to itself: what is its own needs no message ({failed.where})"
        raise NotYet(to_itself) from None


def by_messages(contract: Contract, seen: Seen) -> None:
    """Nothing but send and receive was called: they are the material."""
    others = sorted({c.kind for c in seen.issued} - {"send", "recv"})
    contract.holds(not others, f"calls the library's {others and others[0]}: build it from send and receive")


def equal(contract: Contract, what: str, yours: Any, expected: torch.Tensor) -> None:
    """A float32 tensor with exactly these numbers."""
    contract.values(what, yours, expected, rtol=0)
    kind = yours.dtype if isinstance(yours, torch.Tensor) else type(yours).__name__
    contract.holds(kind == torch.float32, f"{what} should be a tensor of float32, and is {kind}", what)
