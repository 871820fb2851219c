"""Record every collective that a rank issues: kind, bytes, seconds.

PyTorch sends each collective, including those that DDP's C++ reducer, FSDP and DTensor start by themselves, through its
dispatcher as an operator of the ``c10d`` namespace. A kernel registered at ``BackendSelect``, the last stop before the
device's own kernel, records the call and passes it on unchanged. The kernel belongs to the process, so it sees every
thread, and no other operator pays for it. (An autograd key would miss what runs under ``torch.inference_mode``, and a
``TorchDispatchMode`` what other threads do.)

A backend called directly (``ProcessGroupGloo(...).allreduce(...)``, ``group._get_backend(device).allreduce(...)``) goes
past the dispatcher, so its methods are wrapped as well. What remains unseen: bytes that go neither way, through a socket
of the program's own or NCCL called from compiled code. ``run.wire_bytes`` counts the sockets.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from course_lib.observe.collectives import BACKEND_METHODS, KINDS, POINT_TO_POINT, Collective, Pulse

_CONTRIBUTIONS = ("tensors", "tensor", "input_tensors", "input_tensor", "inputTensor", "input", "input_list")
CALLBACK_SECONDS, CALLBACKS_IN_FLIGHT = 0.25, 16  # how long to wait at the end of a run, and for how many of the last


@dataclass
class Recorder:
    """Records every collective of this process, whichever thread issues it, from :meth:`install` on."""

    pulse: Pulse | None = None
    log: list[Collective] = field(default_factory=list)
    _library: Any = None
    _methods: dict[str, Any] = field(default_factory=dict)  # of the backends, as they were
    _zero: float = 0.0
    _ended: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: dict[int, Any] = field(default_factory=dict)
    _events: list[tuple[Collective, Any, Any]] = field(default_factory=list)

    def install(self) -> Recorder:
        """Start recording. One recorder per process."""
        import torch
        from torch._C._distributed_c10d import Backend

        global _installed
        assert _installed is None, "this process has a recorder already"
        self._library = torch.library.Library("c10d", "IMPL")
        self._zero = time.perf_counter()
        for name, (kind, argument) in KINDS.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is None:  # operators come and go between torch 2.11 and 2.15
                continue
            self._library.impl(name, self._kernel(packet.default, kind, argument), "BackendSelect", with_keyset=True)
        for name, (kind, position) in BACKEND_METHODS.items():
            method = getattr(Backend, name, None)
            if method is not None:
                self._methods[name] = method
                setattr(Backend, name, self._method(method, kind, position))
        _installed = self
        return self

    def remove(self) -> None:
        """Stop recording; what is in flight still gets its seconds."""
        from torch._C._distributed_c10d import Backend

        global _installed
        self._library._destroy()
        self._library, _installed = None, None
        for name, method in self._methods.items():
            setattr(Backend, name, method)
        self._methods.clear()

    def _kernel(self, op: Any, kind: str, argument: str) -> Callable[..., Any]:
        """Return what the dispatcher calls in place of ``op``."""
        import torch
        from torch.distributed.distributed_c10d import Work

        names = [a.name for a in op._schema.arguments]
        group_at = names.index("process_group")
        tensor_at = names.index(argument) if argument in names else None
        peer_at = next((names.index(name) for name in ("dst", "src") if name in names), None)
        device_kernel = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def recorded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            values = dict(zip(names, args, strict=False)) | kwargs
            group = _members(values[names[group_at]])
            num_bytes = _num_bytes(values[names[tensor_at]]) if tensor_at is not None else 0
            record = self._begin(kind, num_bytes, group, None if peer_at is None else group[values[names[peer_at]]])
            result = op.redispatch(keyset & device_kernel, *args, **kwargs)
            boxed = result[-1] if isinstance(result, (tuple, list)) else result  # (tensors, work), or the work alone
            if kind in POINT_TO_POINT:
                self._end_unseen(record)
                return result
            work = Work.unbox(boxed)
            noted = self._note_end(record, work)
            if noted is work:
                return result
            self._kept[id(record)] = noted  # C++ keeps no Python object alive
            boxed = noted.boxed()
            return type(result)((*result[:-1], boxed)) if isinstance(result, (tuple, list)) else boxed

        return recorded

    def _method(self, method: Any, kind: str, position: int | None) -> Callable[..., Any]:
        """Return what Python code calls in place of a backend's ``method``."""

        @functools.wraps(method)
        def recorded(backend: Any, *args: Any, **kwargs: Any) -> Any:
            num_bytes, peer = 0, None
            if position is not None:
                named = (kwargs[name] for name in _CONTRIBUTIONS if name in kwargs)
                num_bytes = _num_bytes(args[position] if position < len(args) else next(named, ()))
            if method.__name__ in ("send", "recv"):
                peer = args[1] if len(args) > 1 else kwargs.get("dstRank", kwargs.get("srcRank"))
            record = self._begin(kind, num_bytes, tuple(range(backend.size())), peer)
            work = method(backend, *args, **kwargs)
            if kind in POINT_TO_POINT:
                self._end_unseen(record)
                return work
            return self._note_end(record, work)

        return recorded

    def _begin(self, kind: str, num_bytes: int, group: tuple[int, ...], peer: int | None) -> Collective:
        import torch

        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        record = Collective(rank, kind, num_bytes, None, time.perf_counter() - self._zero, group, peer)
        with self._lock:
            self.log.append(record)
            self._write_pulse(record)
        return record

    def _write_pulse(self, record: Collective) -> None:
        if self.pulse is not None:
            self.pulse.write(len(self.log), self._ended, record.bytes, record.kind)

    def _end_unseen(self, record: Collective) -> None:
        """Count a call as ended whose end nobody reports: gloo's send and recv (a hang still shows in the stack), NCCL's
        before its events are read."""
        with self._lock:
            self._ended += 1
            self._write_pulse(record)

    def _end(self, record: Collective) -> None:
        record.seconds = time.perf_counter() - self._zero - record.start
        self._kept.pop(id(record), None)
        self._end_unseen(record)

    def _note_end(self, record: Collective, work: Any) -> Any:
        """Have the end of ``work`` recorded. Returns the work for the caller to wait for: itself, or one around it."""
        import torch

        try:
            future = work.get_future()
        except RuntimeError:  # gloo's reduce_scatter has none
            return _work_with_end(work, lambda: self._end(record))
        if torch.cuda.is_initialized() and "nccl" in torch.distributed.get_backend():
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()

            def done_on_gpu(_: Any) -> None:
                end = torch.cuda.Event(enable_timing=True)
                end.record()  # the callback runs on a stream that waits for NCCL's
                self._events.append((record, begin, end))
                self._end_unseen(record)

            future.add_done_callback(done_on_gpu)
            return work

        def done(future: Any) -> None:
            try:
                future.value()
            except RuntimeError:  # a peer is gone: this rank never got out of it, and will hear of it by itself
                return
            self._end(record)

        future.add_done_callback(done)
        return work

    def collect(self) -> list[Collective]:
        """Return the log so far, having waited for the device on CUDA, and a moment for callbacks: the seconds are known."""
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


@contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """Collect the collectives that this rank issues within the block, from every thread; also under torchrun.

    >>> with record_collectives() as issued:
    ...     loss.backward()
    >>> sum(c.bytes for c in issued if c.kind == "all_reduce")

    Yields:
        a list that is filled when the block ends.
    """
    own = Recorder().install() if _installed is None else None
    recorder = own or _installed
    first, issued = len(recorder.log), []
    try:
        yield issued
    finally:
        issued += recorder.collect()[first:]
        if own is not None:
            own.remove()


_installed: Recorder | None = None


def _work_with_end(work: Any, ended: Callable[[], None]) -> Any:
    """Return ``work`` so that ``ended`` is called when somebody has waited for it."""
    return _noted_class()(work, ended)


@functools.cache
def _noted_class() -> type:
    """Make the class once: a class holds reference cycles, and one per call would keep ``work`` and its tensors alive."""
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
