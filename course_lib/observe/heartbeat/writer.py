"""Write a rank's heartbeat: the training loop reports how far it got, a thread writes that to a file."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from numbers import Real
from typing import Any

import psutil

from course_lib.observe.heartbeat.beats import DONE, Beat, write_beat
from course_lib.observe.heartbeat.pace import Pace
from course_lib.observe.heartbeat.position import Position


class Heartbeat:
    """Says "rank r got to step n, phase p" through a small file, from the training loop.

    The beat comes from the loop, and not from a thread of its own: a thread goes on beating while the loop waits for
    ever in an all-reduce, so it would only prove that the process exists. The thread in here originates nothing. It
    carries the loop's last word to the disk, about once in ``every`` seconds, so that a slow disk or a full one cannot
    hold up the training: ``beat`` costs microseconds.

    The promise: while the rank is well, its loop beats again within ``every`` seconds, or within 5 times its median
    step where that is longer; the file says which, and the `Watchdog` raises its alarm before two of them have passed.
    What takes longer (saving, compiling, evaluating) is declared:

    >>> with heartbeat.phase("saving", may_take=60):
    ...     save(...)

    Use it as a context manager: a process that is gone without having left the block counts as dead. On a shared file
    system give ``every`` more seconds than the system may take to show a file to another machine.

    Args:
        folder: one folder for all ranks of a run; made where it is missing.
        rank: this rank; ``None`` reads ``RANK``, and is 0 without it.
        every: seconds between two beats.
        start_may_take: seconds granted until the first step, and for each of the first three, which compile and connect.

    Raises:
        ValueError: a rank or a time that makes no sense.
        OSError: the folder cannot be written: better known now than after a day of training.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int | None = None,
        every: float = 10.0,
        start_may_take: float = 300.0,
    ) -> None:
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ValueError(f"rank={rank!r}: give this rank's number, 0 or more.")
        for name, value in (("every", every), ("start_may_take", start_may_take)):
            check_seconds(name, value)
        os.makedirs(folder, exist_ok=True)
        self.folder, self.rank = os.path.abspath(folder), rank
        self.problem = ""  # why the last write failed
        self._pace = Pace(float(every), float(start_may_take), time.monotonic())
        self._numbers: dict[str, float | str] = {}
        process = psutil.Process()
        self._process = {"pid": process.pid, "born": process.create_time(), "host": socket.gethostname()}
        self._stack = self._answer_signals()
        self._changed = threading.Condition()
        self._pending, self._urgent, self._idle, self._ended, self._written_at = False, False, False, "", self._pace.at
        self._position = Position(self.folder, rank)
        write_beat(self.folder, self._record())
        self._thread = threading.Thread(target=self._carry, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self, step: int | None = None, phase: str = "", **numbers: float) -> None:
        """The loop came by: at ``step`` (``None``: the same as before), about to begin ``phase``.

        Args:
            step: number of the step that begins or goes on.
            phase: data, forward, backward, optimizer, …; any name, the same on every rank.
            numbers: Python numbers to show (loss, tokens per second). No tensors: reading one waits for the GPU.

        Raises:
            TypeError: a number that is a tensor, or no number.
        """
        for name, value in numbers.items():
            if not isinstance(value, Real):
                raise TypeError(f"{name} is a {type(value).__name__}: give a Python number that you have already read.")
        with self._changed:
            if self._ended:  # what is done stays done
                return
            self._pace.beat(time.monotonic(), step, phase)
            self._position.write(self._pace.step, self._pace.turn, self._pace.total, self._pace.phase)
            self._numbers.update((name, _plain(value)) for name, value in numbers.items())
            self._tell()

    @contextlib.contextmanager
    def phase(self, name: str, *, may_take: float) -> Iterator[None]:
        """Declare a phase that takes longer than a heartbeat; an alarm comes after ``may_take`` seconds of silence.

        Declare it on every rank that enters it. Ranks that wait meanwhile for one that has declared are not suspected.

        Raises:
            ValueError: ``may_take`` is no time.
        """
        check_seconds("may_take", may_take)
        before = self._declare(name, float(may_take))
        try:
            yield
        finally:
            self._declare(*before)

    def longest_gap(self) -> float:
        """Seconds of the longest silence between two beats since the last call: how near a false alarm was."""
        with self._changed:
            return self._pace.longest_gap()

    @property
    def every(self) -> float:
        """Seconds between two beats that this rank promises at the moment."""
        with self._changed:
            return self._pace.every

    def close(self, ended: str = DONE) -> None:
        """The last word: this rank has ended as it should, or by the exception named."""
        with self._changed:
            self._ended = self._ended or ended
            self._tell(urgent=True)
        self._thread.join(5.0)  # a file system that hangs must not hold up the end
        self._position.close()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        good = error is None or (isinstance(error, SystemExit) and not error.code)
        self.close(DONE if good else f"{type(error).__name__}: {error}".strip())

    # ------------------------------------------------------------------------------------------------ to the file
    def _declare(self, name: str, may_take: float | None) -> tuple[str, float | None]:
        with self._changed:
            before = self._pace.declare(time.monotonic(), name, may_take)
            self._tell(urgent=True)
        return before

    def _tell(self, *, urgent: bool = False) -> None:
        self._pending, self._urgent = True, self._urgent or urgent
        if self._idle or urgent:  # waking the thread for each beat would cost more than the beat
            self._changed.notify()

    def _carry(self) -> None:
        while True:
            with self._changed:
                while not self._urgent:
                    self._idle = not self._pending
                    left = None if self._idle else self._written_at + self._pace.every - time.monotonic()
                    if left is not None and left <= 0:
                        break
                    self._changed.wait(left)
                record, at, last = self._record(), self._pace.at, bool(self._ended)
                self._pending = self._urgent = self._idle = False
            try:
                write_beat(self.folder, record)
                self.problem = ""
            except OSError as error:
                if not self.problem:
                    print(
                        f"heartbeat of rank {self.rank}: its file cannot be written ({error}); training goes on, and "
                        "the watchdog will take this rank for one that hangs.",
                        file=sys.stderr,
                    )
                self.problem = str(error)
            self._written_at = at
            if last:
                return

    def _record(self) -> Beat:
        now, pace = time.monotonic(), self._pace
        return Beat(
            rank=self.rank,
            step=pace.step,
            phase=pace.phase,
            turn=pace.turn,
            total=pace.total,
            age=now - pace.at,
            every=pace.every,
            may_take=pace.may_take,
            ended=self._ended,
            time=time.time(),
            stack=self._stack,
            numbers=dict(self._numbers),
            **self._process,
        )

    def _answer_signals(self) -> str:
        """Write the Python stack to a file on SIGUSR2, by a C handler: a rank stuck in C answers too.

        SIGUSR1 is `course_lib.launch`'s. The handler stays for good: a signal that finds none ends the process.
        """
        if not hasattr(faulthandler, "register"):
            return ""
        name = f"rank{self.rank}.stack"
        file = open(os.path.join(self.folder, name), "w")  # faulthandler keeps it open
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=False)
        return name


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError where ``value`` is no finite time above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: give seconds, more than 0.")


def _plain(value: Any) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))
