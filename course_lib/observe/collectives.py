"""The operators that count as collectives, the record of one call, and the pulse that shows what a rank is doing."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

# operator of torch.ops.c10d -> (the field's name, which argument holds this rank's contribution)
KINDS: dict[str, tuple[str, str]] = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "allgather_": ("all_gather", "input_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor"),
    "allgather_coalesced_": ("all_gather", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "input_tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "barrier": ("barrier", ""),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
}
# method of a backend -> (the field's name, position of the argument that holds this rank's contribution)
BACKEND_METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}
POINT_TO_POINT = frozenset({"send", "recv"})


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
