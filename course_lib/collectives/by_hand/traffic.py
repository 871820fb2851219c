"""Messages and bytes that this rank sent through ``course_lib.collectives.by_hand``: counted where they are sent, so exact."""

from __future__ import annotations

import torch

_open: list[Traffic] = []


class Traffic:
    """Counts what this rank sends inside a ``with`` block; what it receives is another rank's count.

    >>> with Traffic() as sent:
    ...     ring.all_reduce(gradient)
    >>> sent.bytes, sent.messages, sent.largest

    The launch's recorder sees the same messages as ``send`` (``run.collectives``), headers included; the system's own
    counter (``observe.WireMeter``) adds what gloo wraps around each message.

    Attributes:
        bytes: payload sent, bytes.
        messages: payload messages sent; an empty tensor is no message.
        largest: bytes of the largest one.
        to: payload bytes by receiver, its global rank.
        header_bytes: bytes of the headers by which the ranks agree beforehand (see ``agreement``).
        header_messages: how many there were.
    """

    def __init__(self) -> None:
        self.bytes = self.messages = self.largest = self.header_bytes = self.header_messages = 0
        self.to: dict[int, int] = {}

    def __enter__(self) -> Traffic:
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)

    def __repr__(self) -> str:
        return f"Traffic({self.messages} messages, {self.bytes} bytes, largest {self.largest})"


def note(tensor: torch.Tensor, to: int, *, header: bool = False) -> None:
    """Add one message, ``tensor`` to global rank ``to``, to every count that is open."""
    size = tensor.numel() * tensor.element_size()
    for traffic in _open:
        if header:
            traffic.header_bytes += size
            traffic.header_messages += 1
        else:
            traffic.bytes += size
            traffic.messages += 1
            traffic.largest = max(traffic.largest, size)
            traffic.to[to] = traffic.to.get(to, 0) + size
