"""Record every collective that a rank issues: kind, bytes, shapes, seconds.

PyTorch sends each collective, including those that DDP's C++ reducer, FSDP and DTensor start by themselves, through its
dispatcher as an operator of the ``c10d`` namespace. A kernel registered at ``BackendSelect``, the last stop before the
device's own kernel, records the call and passes it on unchanged. The kernel belongs to the process, so it sees every
thread, and no other operator pays for it. (An autograd key would miss what runs under ``torch.inference_mode``, and a
``TorchDispatchMode`` what other threads do.)

What remains unseen: a backend's methods called past the dispatcher (``group._get_backend(device).allreduce(...)``), NCCL
called from compiled code, a socket of the program's own. ``run.wire_bytes`` counts the sockets.
"""

from __future__ import annotations

import functools
import mmap
import struct
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_OPERATORS = {  # the field's name -> operators of torch.ops.c10d; some come and go between torch 2.11 and 2.15
    "all_reduce": "allreduce_ allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
    "gather": "gather_",
    "scatter": "scatter_",
    "all_to_all": "alltoall_ alltoall_base_",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv_ recv_any_source_",
}
POINT_TO_POINT = frozenset({"send", "recv"})
UNTOLD = POINT_TO_POINT | {"reduce_scatter"}  # gloo tells nobody of their end; a hang still shows in the stack
# what every rank contributes as many bytes to; to an all_to_all it need not
SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"})
# the argument that holds this rank's contribution, where an operator has several of these
_CONTRIBUTIONS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors")
CALLBACK_SECONDS, CALLBACKS_IN_FLIGHT = 0.25, 16  # how long to wait at the end of a run, and for how many of the last


@dataclass(slots=True)
class Collective:
    """One collective as one rank saw it.

    Attributes:
        rank: the rank that issued it.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``send``, …
        bytes: what this rank put in (a receiver: what it took out), in bytes. Not what crossed the wire.
        seconds: from issue to completion, waiting for late ranks included; ``None`` where gloo does not tell (see
            UNTOLD) or the run ended first.
        start: seconds since the recorder was installed.
        group: global ranks that took part.
        peer: the other end of a send or a recv, a global rank; ``None`` for collectives and any source.
        shapes: of the tensors that ``bytes`` counts, in their order.
    """

    rank: int
    kind: str
    bytes: int
    seconds: float | None
    start: float
    group: tuple[int, ...]
    peer: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes that a ring algorithm makes this rank send (Patarasuk & Yuan 2009); by formula, not by count.

        In a reduce every rank but its root sends all bytes once: this is the mean over the ranks.
        """
        n = len(self.group)
        share = (n - 1) / n
        factor = {"all_reduce": 2 * share, "all_gather": n - 1.0}
        factor |= dict.fromkeys(("reduce", "reduce_scatter", "all_to_all"), share)
        if self.kind in factor:
            return factor[self.kind] * self.bytes
        return float(self.bytes) if self.kind == "send" else 0.0


class Reading(NamedTuple):
    """What a rank's pulse says; all zero for a rank that issued nothing.

    Attributes:
        begun, ended: collectives so far.
        bytes, kind, shapes: of the last one begun; the shapes as text.
        group, number: equal on ranks that are in the same call: which group, and which of its collectives; 0 for a send
            or a recv.
        same_size: every rank has to contribute the same number of bytes to it.
    """

    begun: int = 0
    ended: int = 0
    bytes: int = 0
    group: int = 0
    number: int = 0
    same_size: bool = False
    kind: str = ""
    shapes: str = ""


class Pulse:
    """What a rank is doing right now, in a few bytes of a shared file: readable when the rank no longer answers."""

    LAYOUT, ENDED, TEXT = struct.Struct("<qqqqq?24s64s"), struct.Struct("<q"), 64

    def __init__(self, path: str) -> None:
        with open(path, "w+b") as file:
            file.truncate(self.LAYOUT.size)
            self._page = mmap.mmap(file.fileno(), self.LAYOUT.size)

    def begin(self, begun: int, ended: int, call: Collective, *which: int) -> None:
        """``which``: group, number and same_size of the `Reading`."""
        shapes = ", ".join(map(str, call.shapes[: self.TEXT])).encode()  # each is longer than a character
        if len(shapes) > self.TEXT:
            shapes = shapes[: self.TEXT - len("…".encode())] + "…".encode()
        self.LAYOUT.pack_into(self._page, 0, begun, ended, call.bytes, *which, call.kind.encode(), shapes)

    def end(self, ended: int) -> None:
        self.ENDED.pack_into(self._page, self.ENDED.size, ended)

    @classmethod
    def read(cls, path: str) -> Reading:
        with open(path, "rb") as file:
            *numbers, kind, shapes = cls.LAYOUT.unpack(file.read(cls.LAYOUT.size))
        return Reading(*numbers, *(text.rstrip(b"\0").decode(errors="replace") for text in (kind, shapes)))


@dataclass
class Recorder:
    """Records every collective of this process, whichever thread issues it, from :meth:`install` on."""

    pulse: Pulse | None = None
    log: list[Collective] = field(default_factory=list)
    around: Callable[[Any], AbstractContextManager[Any]] = nullcontext  # see `around_calls`
    _users: int = 0
    _library: Any = None
    _zero: float = 0.0
    _ended: int = 0
    _numbers: Counter[int] = field(default_factory=Counter)  # collectives begun, by group
    _lock: Any = field(default_factory=threading.RLock)
    _events: deque[tuple[Collective, Any, Any]] = field(default_factory=deque)  # of collectives on a GPU

    def install(self) -> Recorder:
        """Start recording. One recorder per process; as many calls of :meth:`remove` as of this one end it."""
        import torch

        global _installed
        assert _installed in (None, self), "this process has a recorder already"
        self._users += 1
        if self._users == 1:
            _installed, self._zero, self._library = self, time.perf_counter(), torch.library.Library("c10d", "IMPL")
            for kind, name in ((kind, name) for kind, names in _OPERATORS.items() for name in names.split()):
                if (packet := getattr(torch.ops.c10d, name, None)) is not None:
                    kernel = self._kernel(packet.default, kind)
                    self._library.impl(name, kernel, "BackendSelect", with_keyset=True)
        return self

    def remove(self) -> None:
        """Stop recording; what is in flight still gets its seconds."""
        global _installed
        self._users -= 1
        if not self._users:
            _installed = None
            self._library._destroy()

    def _kernel(self, op: Any, kind: str) -> Callable[..., Any]:
        """Return what the dispatcher calls in place of ``op``."""
        import torch
        from torch.distributed import ProcessGroup, get_process_group_ranks
        from torch.distributed.distributed_c10d import Work

        names = [a.name for a in op._schema.arguments]
        contribution = next((name for name in _CONTRIBUTIONS if name in names and kind != "barrier"), None)
        peer = next((name for name in ("dst", "src") if name in names), None)
        device_kernel = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def recorded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            values = dict(zip(names, args, strict=False)) | kwargs
            group = ProcessGroup.unbox(values["process_group"])
            ranks, tensors = tuple(get_process_group_ranks(group)), _tensors(values.get(contribution, ()))
            to = ranks[values[peer]] if peer else None
            record, counted_as = self._begin(kind, tensors, ranks, to, group.group_name)
            on_gpu = (
                tensors[0].is_cuda
                if tensors
                else torch.cuda.is_initialized() and "nccl" in torch.distributed.get_backend()
            )
            begin = _gpu_event() if on_gpu else None
            try:
                with self.around((args, kwargs)):
                    result = op.redispatch(keyset & device_kernel, *args, **kwargs)
            except BaseException:  # refused: it is not under way, and no call of its group
                with self._lock:
                    self._numbers[counted_as] -= 1
                    if self.pulse is not None:
                        self.pulse.begin(len(self.log), self._ended, record, 0, 0, False)
                self._end(record)
                raise
            boxed = result[-1] if isinstance(result, (tuple, list)) else result  # (tensors, work), or the work alone
            self._note_end(record, Work.unbox(boxed), begin)
            return result

        return recorded

    def _begin(
        self, kind: str, tensors: list[Any], ranks: tuple[int, ...], peer: int | None, group_name: str
    ) -> tuple[Collective, int]:
        import torch

        num_bytes, shapes = sum(t.numel() * t.element_size() for t in tensors), tuple(tuple(t.shape) for t in tensors)
        start = time.perf_counter() - self._zero
        record = Collective(torch.distributed.get_rank(), kind, num_bytes, None, start, ranks, peer, shapes)
        group = 0 if kind in POINT_TO_POINT else _group_number(group_name, ranks)
        with self._lock:
            self._count_ended()
            self.log.append(record)
            self._numbers[group] += 1
            if self.pulse is not None:
                # NCCL gathers tensors of different sizes too
                same_size = kind in SAME_SIZE and not (kind == "all_gather" and tensors[0].is_cuda)
                number = self._numbers[group] if group else 0
                self.pulse.begin(len(self.log), self._ended, record, group, number, same_size)
        return record, group

    def _end(self, record: Collective, seconds: float | None = None) -> None:
        record.seconds = seconds
        with self._lock:
            self._ended += 1
            if self.pulse is not None:
                self.pulse.end(self._ended)

    def _note_end(self, record: Collective, work: Any, begin: Any) -> None:
        """Have the end of a collective recorded. ``begin``: an event of the stream that issued it, on a GPU."""
        if record.kind in POINT_TO_POINT:
            self._end(record)
            return
        if work is None:  # NCCL has put a call that is not async on the current stream
            self._events.append((record, begin, _gpu_event()))
            return
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's reduce_scatter has none
            self._end(record)
            return

        def done(future: Any) -> None:
            if begin is not None:  # this runs on a stream that waits for NCCL's
                self._events.append((record, begin, _gpu_event()))
                return
            with suppress(RuntimeError):  # a peer is gone: this rank never got out of it, and will hear of it by itself
                future.value()
                self._end(record, time.perf_counter() - self._zero - record.start)

        future.add_done_callback(done)

    def _count_ended(self) -> None:
        """Count what the GPU has done by now."""
        with self._lock:
            while self._events and self._events[0][2].query():
                record, begin, end = self._events.popleft()
                self._end(record, begin.elapsed_time(end) / 1e3)

    def collect(self) -> list[Collective]:
        """Return the log with its seconds; waits for the GPU, and up to CALLBACK_SECONDS for gloo's callbacks."""
        if self._events:
            import torch

            torch.cuda.synchronize()
            self._count_ended()
        # A collective's waiter may go on before its callback has run on gloo's own thread
        give_up = time.perf_counter() + CALLBACK_SECONDS
        while time.perf_counter() < give_up and any(
            c.seconds is None and c.kind not in UNTOLD for c in self.log[-CALLBACKS_IN_FLIGHT:]
        ):
            time.sleep(0.001)
        return list(self.log)


_installed: Recorder | None = None


@contextmanager
def around_calls(around: Callable[[Any], AbstractContextManager[Any]]) -> Iterator[None]:
    """Within it each backend's call is made inside ``around(arguments)``, whoever makes it."""
    recorder = (_installed or Recorder()).install()
    before, recorder.around = recorder.around, around
    try:
        yield
    finally:
        recorder.around = before
        recorder.remove()


@contextmanager
def pause_after_waiting() -> Iterator[None]:
    """Within it, 1 ms of sleep follows each ``Work.wait()`` in Python, in which gloo's threads drop their tensors.

    Otherwise a tensor that was sent may still be there a little later, on one run and not on the next.
    """
    from torch.distributed.distributed_c10d import Work

    wait = Work.wait

    def paused(work: Any, *timeout: Any) -> bool:
        done = wait(work, *timeout)
        time.sleep(1e-3)  # which also hands them Python's lock
        return done

    Work.wait = paused
    try:
        yield
    finally:
        Work.wait = wait


@contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """Collect the collectives that this rank issues within the block, from every thread; also under torchrun.

    >>> with record_collectives() as issued:
    ...     loss.backward()
    >>> sum(c.bytes for c in issued if c.kind == "all_reduce")

    Yields:
        a list that is filled when the block ends. Blocks may lie in each other, and in a launch.
    """
    recorder = (_installed or Recorder()).install()
    first, issued = len(recorder.log), []
    try:
        yield issued
    finally:
        recorder.remove()
        issued += recorder.collect()[first:]


def _gpu_event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _tensors(value: Any) -> list[Any]:
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else [value]


@functools.cache
def _group_number(name: str, ranks: tuple[int, ...]) -> int:
    return zlib.crc32(f"{name}: {ranks}".encode())
