"""Optional callbacks that report a resumable run's progress: a heartbeat for the watchdog, numbers for a chart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType

import psutil
import torch

from course_lib.observe.heartbeat import Heartbeat

MAY_TAKE = 120.0  # seconds that loading or saving may be silent


class Reports:
    """A heartbeat and a log behind one context manager.

    Args:
        heartbeat: folder of the heartbeats that ``course_tools.monitoring`` reads; "" for none.
        every: seconds between two beats.
        log: called as ``log(step, **numbers)`` after each update; None for none.
        rank: this rank.
    """

    def __init__(self, heartbeat: str, every: float, log: Callable[..., None] | None, rank: int) -> None:
        self._heartbeat = Heartbeat(heartbeat, rank=rank, every=every) if heartbeat else None
        self._log = log

    def __enter__(self) -> Reports:
        self._since = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._heartbeat is not None:
            self._heartbeat.__exit__(kind, error, trace)  # it says how the rank ended

    def beat(self, step: int, phase: str) -> None:
        """This rank is about to begin a phase of a step."""
        if self._heartbeat is not None:
            self._heartbeat.beat(step, phase)

    @contextmanager
    def long(self, step: int, phase: str) -> Iterator[None]:
        """Around what takes longer than a step."""
        self.beat(step, phase)
        with nullcontext() if self._heartbeat is None else self._heartbeat.phase(phase, may_take=MAY_TAKE):
            yield

    def log(self, step: int, *, tokens: int, **numbers: float) -> None:
        """Update ``step`` is done, on ``tokens`` tokens of this rank."""
        if self._heartbeat is not None:
            self._heartbeat.beat(step, "done", **numbers)
        if self._log is None:
            return
        now = time.monotonic()
        memory = (
            torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else psutil.Process().memory_info().rss
        )
        self._log(step, **numbers, tokens_per_second=tokens / (now - self._since), memory_bytes=memory)
        self._since = now
