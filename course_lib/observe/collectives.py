"""Every collective that a rank issues: kind, bytes, seconds.

PyTorch sends each collective, also those that DDP's C++ reducer and FSDP start by themselves, through its dispatcher
as an operator of the ``c10d`` namespace. A kernel registered at ``BackendSelect``, the last stop before the device's
own kernel, sees the call, notes it and hands it on unchanged: nothing is replaced, no other operator pays for it, and
neither the model nor the training loop knows. (An autograd key would miss what runs under ``torch.inference_mode``.)
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
CALLBACK_SECONDS, CALLBACKS_IN_FLIGHT = 0.25, 16  # how long to wait at the end of a run, and for how many of the last
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
        group: global ranks that took part.
    """

    rank: int
    kind: str
    bytes: int
    seconds: float | None
    start: float
    group: tuple[int, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes that a ring algorithm makes this rank send (Patarasuk & Yuan 2009); by formula, not by count."""
        n = len(self.group)
        factor = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": n - 1.0}
        if self.kind in factor:
            return factor[self.kind] * self.bytes
        return float(self.bytes) if self.kind == "send" else 0.0


class Pulse:
    """What a rank is doing right now, in 64 bytes of a shared file: readable when the rank itself no longer answers."""

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


@dataclass
class Recorder:
    """Notes every collective of this process from :meth:`install` on. One a process is enough."""

    pulse: Pulse | None = None
    log: list[Collective] = field(default_factory=list)
    _library: Any = None
    _zero: float = 0.0
    _ended: int = 0
    _kept: dict[int, Any] = field(default_factory=dict)
    _events: list[tuple[Collective, Any, Any]] = field(default_factory=list)

    def install(self) -> Recorder:
        import torch

        assert self._library is None, "a recorder is installed once"
        self._library = torch.library.Library("c10d", "IMPL")
        self._zero = time.perf_counter()
        for name, (kind, argument) in KINDS.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is None:  # operators come and go between torch 2.11 and 2.15
                continue
            self._library.impl(name, self._kernel(packet.default, kind, argument), "BackendSelect", with_keyset=True)
        return self

    def remove(self) -> None:
        """Note nothing more; what is in flight still gets its seconds."""
        self._library._destroy()
        self._library = None

    def _kernel(self, op: Any, kind: str, argument: str) -> Callable[..., Any]:
        import torch

        names = [a.name for a in op._schema.arguments]
        group_at = names.index("process_group")
        tensor_at = names.index(argument) if argument in names else None
        device_kernel = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def noted(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            values = dict(zip(names, args, strict=False)) | kwargs
            record = Collective(
                rank=torch.distributed.get_rank(),
                kind=kind,
                bytes=_num_bytes(values[names[tensor_at]]) if tensor_at is not None else 0,
                seconds=None,
                start=time.perf_counter() - self._zero,
                group=_members(values[names[group_at]]),
            )
            self.log.append(record)
            self._beat(record)
            result = op.redispatch(keyset & device_kernel, *args, **kwargs)
            if isinstance(result, (tuple, list)):  # (tensors, work)
                return type(result)((*result[:-1], self._note_end(record, result[-1])))
            return self._note_end(record, result)

        return noted

    def _beat(self, record: Collective) -> None:
        if self.pulse is not None:
            self.pulse.write(len(self.log), self._ended, record.bytes, record.kind)

    def _end(self, record: Collective) -> None:
        record.seconds = time.perf_counter() - self._zero - record.start
        self._ended += 1
        self._kept.pop(id(record), None)
        self._beat(record)

    def _note_end(self, record: Collective, boxed_work: Any) -> Any:
        """See to it that the end gets noted. Returns the work for the caller to wait for."""
        import torch

        if record.kind in POINT_TO_POINT:
            self._ended += 1  # gloo gives no completion time for these; a hang still shows in the stack
            self._beat(record)
            return boxed_work
        work = torch.distributed.distributed_c10d.Work.unbox(boxed_work)
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's reduce_scatter has none
            noted = _work_with_end(work, lambda: self._end(record))
            self._kept[id(record)] = noted  # C++ keeps no Python object alive
            return noted.boxed()
        if torch.cuda.is_initialized() and "nccl" in torch.distributed.get_backend():
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()

            def done_on_gpu(_: Any) -> None:
                end = torch.cuda.Event(enable_timing=True)
                end.record()  # the callback runs on a stream that waits for NCCL's
                self._events.append((record, begin, end))
                self._ended += 1
                self._beat(record)

            future.add_done_callback(done_on_gpu)
            return boxed_work

        def done(future: Any) -> None:
            try:
                future.value()
            except RuntimeError:  # a peer is gone: this rank never got out of it, and will hear of it by itself
                return
            self._end(record)

        future.add_done_callback(done)
        return boxed_work

    def collect(self) -> list[Collective]:
        """The log so far. Waits for the device on CUDA, and a moment for callbacks, so that the seconds are known."""
        # A collective's waiter may go on before its callback has run on gloo's own thread
        give_up = time.perf_counter() + CALLBACK_SECONDS
        while time.perf_counter() < give_up and any(
            c.seconds is None and c.kind not in POINT_TO_POINT for c in self.log[-CALLBACKS_IN_FLIGHT:]
        ):
            time.sleep(0.001)
        if self._events:
            import torch

            torch.cuda.synchronize()
            for record, begin, end in self._events:
                record.seconds = begin.elapsed_time(end) / 1e3
            self._events.clear()
        return list(self.log)


def _work_with_end(work: Any, ended: Callable[[], None]) -> Any:
    """``work``, and a call of ``ended`` when somebody has waited for it."""
    return _noted_class()(work, ended)


@functools.cache
def _noted_class() -> type:
    """Made once: a class is full of circles, and one made for each call would keep ``work`` and its tensors alive."""
    from torch.distributed.distributed_c10d import Work

    class Noted(Work):
        def __init__(self, work: Any, ended: Callable[[], None]) -> None:
            super().__init__()
            self._work, self._ended = work, ended

        def wait(self, *timeout: Any) -> bool:
            work, ended = self._work, self._ended
            if work is None:  # waited for before
                return True
            done = work.wait(*timeout)
            self._work = self._ended = None  # gloo's work holds the whole input of a reduce_scatter
            ended()
            return done

        def is_completed(self) -> bool:
            return self._work is None or self._work.is_completed()

    return Noted


def _num_bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(_num_bytes(v) for v in value)
    return value.numel() * value.element_size()


_GROUPS: dict[str, tuple[int, ...]] = {}


def _members(boxed_group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    group = dist.ProcessGroup.unbox(boxed_group)
    if group.group_name not in _GROUPS:
        _GROUPS[group.group_name] = tuple(dist.get_process_group_ranks(group))
    return _GROUPS[group.group_name]
