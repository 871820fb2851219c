"""Trace one step: when this rank computed and when it communicated, as spans for a timeline of several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

MERGE_SECONDS = 100e-6  # operations of one kind that follow each other this closely are drawn as one
_BACKWARD = "autograd::engine::evaluate_function"
_KINDS = {  # how an operation's name begins -> its kind
    ("gloo:", "nccl:", "ncclDevKernel"): "collective",
    (_BACKWARD, "torch.distributed.ddp.reducer"): "backward",
    ("Optimizer.step#",): "optimizer",
    ("DistributedDataParallel.forward", "FullyShardedDataParallel.forward"): "forward",
}


@dataclass(slots=True)
class Span:
    """A stretch of time in which one thread did one kind of thing.

    Attributes:
        name: ``gloo:all_reduce``, ``Optimizer.step#AdamW.step``, a ``record_function`` label; for a stretch of many
            operations the name of their kind.
        kind: ``"forward"`` (operations outside the rest, up to the last backward pass), ``"backward"``,
            ``"optimizer"``, ``"collective"`` (moving and waiting for late ranks) or ``"other"``.
        start, end: seconds since the epoch: one clock for all ranks of a machine.
        thread: the system's thread id; for work on a GPU minus one minus its stream's number.
    """

    name: str
    kind: str
    start: float
    end: float
    thread: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


def trace_step(step: Callable[[], Any]) -> list[Span]:
    """Profile one call of ``step`` on this rank: its outermost operations, close ones of a kind joined, by start.

    The spans are plain data: return them from the rank's function. A profiled step is slower than others, its many
    small operations most; read the order and the overlap off it, not the length.
    """
    import torch
    from torch.autograd.profiler import profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints a line at every start and stop
    with_gpu = torch.cuda.is_initialized()
    with profile(use_kineto=True, use_device="cuda" if with_gpu else None, acc_events=False) as recording:
        step()
        if with_gpu:
            torch.cuda.synchronize()
    events = [e for e in recording.kineto_results.events() if e.name() != "[memory]"]
    on_gpu = [e for e in events if str(e.device_type()).endswith("CUDA")]
    on_cpu = [e for e in events if not str(e.device_type()).endswith("CUDA")]
    spans = joined(_cpu_spans(on_cpu), MERGE_SECONDS)
    return sorted(spans + joined(_gpu_spans(on_gpu, on_cpu, spans), MERGE_SECONDS), key=lambda s: s.start)


def _kind(event: Any) -> str:
    return next((kind for starts, kind in _KINDS.items() if event.name().startswith(starts)), "")


def _span(event: Any, name: str, kind: str, thread: int) -> Span:
    return Span(name, kind, event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9, thread)


def _cpu_spans(events: list[Any]) -> list[Span]:
    last_backward = max((e.start_ns() for e in events if e.name().startswith(_BACKWARD)), default=0)
    spans, inside_until = [], {}  # by thread, the end of the operation that lies outermost
    for event in sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns())):
        thread, kind, begins = event.device_resource_id(), _kind(event), event.start_ns()
        label = kind == "" and event.is_user_annotation()
        if not label and kind != "collective":  # a label is drawn, and so is what runs inside it
            if begins < inside_until.get(thread, 0):
                continue
            inside_until[thread] = begins + event.duration_ns()
        kind = kind or ("other" if label or begins > last_backward else "forward")
        spans.append(_span(event, event.name() if label or kind in ("collective", "optimizer") else kind, kind, thread))
    return spans


def _gpu_spans(events: list[Any], on_cpu: list[Any], cpu_spans: list[Span]) -> list[Span]:
    """A kernel is of the kind of the CPU's span that launched it."""
    launched_at = {e.correlation_id(): e.start_ns() / 1e9 for e in on_cpu if e.correlation_id()}
    spans = []
    for event in (e for e in events if not e.is_user_annotation()):  # those are the CPU's labels once more
        at = launched_at.get(event.linked_correlation_id(), -1.0)
        origin = {s.kind for s in cpu_spans if s.name == s.kind or s.kind == "optimizer" if s.start <= at <= s.end}
        kind = _kind(event) or next((k for k in ("forward", "backward", "other", "optimizer") if k in origin), "other")
        name = event.name() if kind in ("collective", "other") else kind
        spans.append(_span(event, name, kind, -1 - event.device_resource_id()))
    return spans


def joined(spans: Sequence[Span], within: float) -> list[Span]:
    """Nameless neighbours of one kind on one thread, with less than `within` seconds between them, as one."""
    result: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.thread, s.name, s.start)):
        last = result[-1] if result else None
        same = last and span.name == span.kind and (last.name, last.thread) == (span.name, span.thread)
        if same and span.start - last.end < within:
            result[-1] = replace(last, end=max(last.end, span.end))
        else:
            result.append(span)
    return result
