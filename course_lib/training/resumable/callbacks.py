"""Optional callbacks that report a resumable run's progress: a heartbeat for the watchdog, a tracker for the charts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import psutil
import torch

MAY_TAKE = 120.0  # seconds that loading or saving may be silent


class Reports:
    """A heartbeat and a tracker behind one context manager; each is imported only where it is asked for.

    Args:
        heartbeat: folder of ``course_tools.monitoring``'s heartbeats; "" for none.
        every: seconds between two beats.
        tracker: folder for ``course_lib.observe.tracking``; None for none.
        rank: this rank.
    """

    def __init__(self, heartbeat: str, every: float, tracker: str | None, rank: int) -> None:
        self._heartbeat: Any = None
        self._tracker: Any = None
        if heartbeat:
            from course_lib.observe.heartbeat import Heartbeat

            self._heartbeat = Heartbeat(heartbeat, rank=rank, every=every)
        if tracker:
            from course_lib.observe.tracking import Tracker

            self._tracker = Tracker(tracker, rank=rank)

    def __enter__(self) -> Reports:
        self._open, self._since = ExitStack(), time.monotonic()
        if self._heartbeat is not None:
            self._open.enter_context(self._heartbeat)  # it says how the rank ended
        if self._tracker is not None:
            self._open.callback(self._tracker.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._open.__exit__(kind, error, trace)

    def beat(self, step: int, phase: str) -> None:
        """This rank is about to begin a phase of a step."""
        if self._heartbeat is not None:
            self._heartbeat.beat(step, phase)

    @contextmanager
    def long(self, step: int, phase: str) -> Iterator[None]:
        """Around what takes longer than a step."""
        self.beat(step, phase)
        if self._heartbeat is None:
            yield
        else:
            with self._heartbeat.phase(phase, may_take=MAY_TAKE):
                yield

    def log(self, step: int, *, tokens: int, **numbers: float) -> None:
        """Update ``step`` is done, on ``tokens`` tokens of this rank."""
        if self._heartbeat is not None:
            self._heartbeat.beat(step, "done", **numbers)
        if self._tracker is None:
            return
        now = time.monotonic()
        if self._heartbeat is not None:
            numbers["heartbeat_gap"] = self._heartbeat.longest_gap()
        memory = (
            torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else psutil.Process().memory_info().rss
        )
        numbers |= {"tokens_per_second": tokens / (now - self._since), "memory_bytes": memory}
        self._since = now
        self._tracker.log(step, **numbers)
