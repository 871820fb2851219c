"""Count the messages and bytes that this rank sends through ``course_lib.collectives.by_hand``."""

from __future__ import annotations

import torch

_open: list[Traffic] = []


class Traffic:
    """Count what this rank sends inside a ``with`` block; what it receives is another rank's count.

    >>> with Traffic() as sent:
    ...     ring.all_reduce(gradient)
    >>> sent.bytes, sent.messages, sent.largest

    The launch's recorder sees the same messages as ``send`` (``run.collectives``); the system's own counter
    (``observe.WireMeter``) adds what gloo wraps around each message.

    Attributes:
        bytes: payload sent, bytes.
        messages: messages sent; an empty tensor is no message.
        largest: bytes of the largest one.
        to: bytes by receiver, its global rank.
    """

    def __init__(self) -> None:
        self.bytes = self.messages = self.largest = 0
        self.to: dict[int, int] = {}

    def __enter__(self) -> Traffic:
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)

    def __repr__(self) -> str:
        return f"Traffic({self.messages} messages, {self.bytes} bytes, largest {self.largest})"


def count(tensor: torch.Tensor, to: int) -> None:
    """Add one message, ``tensor`` to global rank ``to``, to every count that is open."""
    size = tensor.numel() * tensor.element_size()
    for traffic in _open:
        traffic.bytes += size
        traffic.messages += 1
        traffic.largest = max(traffic.largest, size)
        traffic.to[to] = traffic.to.get(to, 0) + size
