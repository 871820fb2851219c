"""Trace one step: when this rank computed and when it communicated, as spans for a timeline of several ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from course_lib.observe.profiler import Operations

MERGE_SECONDS = 100e-6  # operations of one kind that follow each other this closely are drawn as one
_BACKWARD = "autograd::engine::evaluate_function"
_WHOLE_FORWARD = ("DistributedDataParallel.forward", "FullyShardedDataParallel.forward")


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
    """Profile one call of ``step`` on this rank. The spans are plain data: return them from the rank's function.

    A profiled step is slower than others, its many small operations most; read the order and the overlap off it, not
    the length.
    """
    import torch

    with Operations(cuda=torch.cuda.is_initialized()) as recording:
        step()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        recording.stop()
    return spans_of(recording.events)


def spans_of(events: Iterable[Any]) -> list[Span]:
    """The profiler's raw events as spans: outermost operations only, close ones of a kind joined, by start."""
    events = list(events)
    on_cpu = [e for e in events if not _on_gpu(e) and e.name() != "[memory]"]
    last_backward = max((e.start_ns() for e in on_cpu if e.name().startswith(_BACKWARD)), default=0)
    spans: list[Span] = []
    by_thread: dict[int, list[Any]] = defaultdict(list)
    for event in on_cpu:
        by_thread[event.device_resource_id()].append(event)
    for thread, own in by_thread.items():
        inside_until = 0
        for event in sorted(own, key=lambda e: (e.start_ns(), -e.duration_ns())):
            kind = _named_kind(event)
            begins, ends = event.start_ns(), event.start_ns() + event.duration_ns()
            label = kind == "" and event.is_user_annotation()
            if not label and kind != "collective":  # a label is drawn, and so is what runs inside it
                if begins < inside_until:
                    continue
                inside_until = ends
            if not kind:
                kind = "other" if label or begins > last_backward else "forward"
            name = event.name() if label or kind in ("collective", "optimizer") else kind
            spans.append(Span(name, kind, begins / 1e9, ends / 1e9, thread))
    spans += _gpu_spans(events, spans)
    return sorted(_joined(spans), key=lambda s: s.start)


def _named_kind(event: Any) -> str:
    name = event.name()
    if name.startswith(("gloo:", "nccl:")) or "ncclDevKernel" in name:
        return "collective"
    if name.startswith((_BACKWARD, "torch.distributed.ddp.reducer")):
        return "backward"
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    return "forward" if name in _WHOLE_FORWARD else ""


def _on_gpu(event: Any) -> bool:
    return str(event.device_type()).endswith("CUDA")


def _gpu_spans(events: list[Any], on_cpu: list[Span]) -> list[Span]:
    """A kernel is of the kind of the CPU's span that launched it."""
    launched_at = {e.correlation_id(): e.start_ns() / 1e9 for e in events if not _on_gpu(e) and e.correlation_id()}
    spans = []
    for event in filter(_on_gpu, events):
        if event.is_user_annotation():  # the CPU's labels once more
            continue
        at = launched_at.get(event.linked_correlation_id(), -1.0)
        origin = (s.kind for s in on_cpu if s.kind != "collective" and s.name == s.kind and s.start <= at <= s.end)
        optimizer = (s.kind for s in on_cpu if s.kind == "optimizer" and s.start <= at <= s.end)
        kind = _named_kind(event) or next(origin, None) or next(optimizer, "other")
        start = event.start_ns() / 1e9
        name = event.name() if kind in ("collective", "other") else kind
        spans.append(Span(name, kind, start, start + event.duration_ns() / 1e9, -1 - event.device_resource_id()))
    return spans


def _joined(spans: list[Span]) -> list[Span]:
    """Nameless neighbours of one kind on one thread, with less than :data:`MERGE_SECONDS` between them, as one."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.thread, s.name, s.start)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and span.name == span.kind
            and (last.name, last.thread) == (span.name, span.thread)
            and span.start - last.end < MERGE_SECONDS
        ):
            last.end = max(last.end, span.end)
        else:
            joined.append(span)
    return joined
