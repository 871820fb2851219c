"""Every message that this rank sends and receives, from any thread, with the rank at its other end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from course_lib.observe import record_collectives


class Message(NamedTuple):
    """One call: its kind (``send``, ``recv``, ``all_reduce``, …), the peer (a global rank, -1: none named), its bytes."""

    kind: str
    peer: int
    bytes: int


@contextmanager
def messages_sent() -> Iterator[list[Message]]:
    """Collect what this rank sends and receives within the block, in the order of the calls; filled when it ends."""
    messages: list[Message] = []
    with record_collectives() as issued:
        yield messages
    messages += [Message(c.kind, -1 if c.peer is None else c.peer, c.bytes) for c in issued]
