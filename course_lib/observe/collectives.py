"""One collective as a rank saw it, and the pulse that tells from outside what a rank is doing."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass


@dataclass(slots=True)
class Collective:
    """One collective as one rank saw it.

    Attributes:
        rank: the rank that issued it.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``send``, …
        bytes: what this rank put in (a receiver: what it took out), in bytes. Not what crossed the wire.
        seconds: from issue to completion, waiting for late ranks included (gloo's reduce_scatter: to the end of the
            ``wait()`` for it); ``None`` where the backend does not tell (gloo's send and recv) or the run ended first.
        start: seconds since the recorder was installed.
        group: global ranks that took part; for a backend called directly its own numbers, 0 to n - 1.
        peer: the other end of a send or a recv, numbered as in ``group``; ``None`` for collectives and any source.
    """

    rank: int
    kind: str
    bytes: int
    seconds: float | None
    start: float
    group: tuple[int, ...]
    peer: int | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes that a ring algorithm makes this rank send (Patarasuk & Yuan 2009); by formula, not by count."""
        n = len(self.group)
        factor = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": n - 1.0}
        if self.kind in factor:
            return factor[self.kind] * self.bytes
        return float(self.bytes) if self.kind == "send" else 0.0


class Pulse:
    """What a rank is doing right now, in 48 bytes of a shared file: readable when the rank itself no longer answers."""

    LAYOUT = struct.Struct("<qqq24s")  # collectives begun, collectives ended, bytes of the last one, its kind

    def __init__(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(bytes(self.LAYOUT.size))
        fd = os.open(path, os.O_RDWR)
        self._page = mmap.mmap(fd, self.LAYOUT.size)
        os.close(fd)

    def write(self, begun: int, ended: int, num_bytes: int, kind: str) -> None:
        self.LAYOUT.pack_into(self._page, 0, begun, ended, num_bytes, kind.encode())

    @classmethod
    def read(cls, path: str) -> tuple[int, int, int, str]:
        """(begun, ended, bytes of the last collective, its kind); all zero for a rank that issued none."""
        with open(path, "rb") as file:
            begun, ended, num_bytes, kind = cls.LAYOUT.unpack(file.read(cls.LAYOUT.size))
        return begun, ended, num_bytes, kind.rstrip(b"\0").decode()
