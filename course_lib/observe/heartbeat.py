"""The heartbeat of a rank: a small file that says how far its training loop got, and by when its next beat is due."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import socket
import statistics
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import psutil

from course_lib.validation import positive

DONE = "done"
NO_STEP = -1  # the rank is there and has begun no step yet
STEPS_A_BEAT = 5.0  # a heartbeat lasts at least this many median steps, so that a slow step is not taken for a hang
WARM_UP = 3  # steps measured before the promise rests on them; the first one compiles, connects and allocates
WINDOW = 16  # steps of the median: it follows sequences that grow longer, and does not follow one slow step
CHECKSUM = b', "checksum": '  # of all that stands before it; the last entry of a file


@dataclass(frozen=True)
class Beat:
    """What one rank last said."""

    rank: int
    step: int = NO_STEP
    phase: str = "start"
    turn: int = 1  # which beat of this step it is; ranks run the same program, so (step, turn) orders them
    total: int = 1  # beats since this process began
    every: float = 1.0  # seconds between two beats that the rank promises at the moment
    may_take: float | None = None  # seconds that it asked for, for a phase that it declared long
    ended: str = ""  # "" while it runs, "done", or the exception that ended it
    pid: int = 0
    born: float = 0.0  # the process's start as the system tells it, so that a reused pid is no mistake
    host: str = ""
    stack: str = ""  # name of the file that takes the rank's Python stack on SIGUSR2; "" where it cannot
    numbers: dict[str, Any] = field(default_factory=dict)  # what the loop added (loss, tokens per second, …)

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.turn

    @property
    def identity(self) -> tuple[int, float, int, str]:
        """Another one means that the rank has come further, or that another process has taken its place."""
        return self.pid, self.born, self.total, self.ended

    @property
    def place(self) -> str:
        """``step 15, backward``"""
        return self.phase if self.step == NO_STEP else f"step {self.step}, {self.phase}".removesuffix(", ")


def read_beats(folder: str | os.PathLike[str]) -> dict[int, Beat]:
    """The last beat of each rank that has written one. A file that is being written just now is left out."""
    found = {}
    for path in Path(folder).glob("rank*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # or somebody else's file
            record, _, checksum = path.read_bytes().rpartition(CHECKSUM)
            if zlib.crc32(record) == int(checksum.rstrip(b"} ")):
                found[int(path.stem.removeprefix("rank"))] = Beat(**json.loads(record + b"}"))
    return found


class Pace:
    """The bookkeeping of one rank's beats. Pure: ``now`` is any clock that only goes forward; all times in seconds."""

    def __init__(self, every: float, start_may_take: float, now: float) -> None:
        self.every, self._shortest, self._start_may_take = every, every, start_may_take
        self.step, self.phase, self.turn, self.total = NO_STEP, "start", 1, 1
        self._declared: float | None = None
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._at = self._step_began = now

    @property
    def may_take(self) -> float | None:
        """Seconds granted to what the loop is in now, where that is more than a heartbeat."""
        at_first = self._start_may_take if len(self._durations) < WARM_UP else None
        return at_first if self._declared is None else self._declared

    def beat(self, now: float, step: int | None, phase: str) -> None:
        """The loop came by."""
        self._count(now)
        if step is not None and step != self.step:
            if self.step != NO_STEP:
                self._durations.append(now - self._step_began)
            if len(self._durations) >= WARM_UP:
                self.every = max(self._shortest, STEPS_A_BEAT * statistics.median(self._durations))
            self.step, self.turn, self._step_began = step, 0, now
        self.phase, self.turn = phase or self.phase, self.turn + 1

    def declare(self, now: float, phase: str, may_take: float | None) -> tuple[str, float | None]:
        """Begin a long phase, or return to what this returned. No turn: often one rank saves, and turns are compared."""
        self._count(now)
        before, self.phase, self._declared = (self.phase, self._declared), phase, may_take
        return before

    def _count(self, now: float) -> None:
        if self._declared is not None:
            self._step_began += now - self._at  # a declared phase does not make its step a slow one
        self._at, self.total = now, self.total + 1


class Heartbeat:
    """Says "rank r got to step n, phase p" through a small file, at once, so a killed rank's last word is exact.

    The training loop beats: a thread would go on while the loop hangs. While the rank is well, its loop comes by within
    ``every`` seconds, or 5 median steps where that is longer; the `Watchdog` raises its alarm before two of them have
    passed. What takes longer (saving, compiling) is declared: ``with heartbeat.phase("saving", may_take=60): ...``

    Use it as a context manager, from one thread: a process that is gone without having left the block counts as dead.
    A beat costs some microseconds, in a folder on NFS a message to its server. A disk that fails costs one sentence,
    kept in ``problem``, and no training.

    Args:
        folder: one folder for all ranks of a run; made where it is missing.
        rank: this rank; ``None`` reads ``RANK``, and is 0 without it.
        every: seconds between two beats; more than a shared file system takes to show a file to another machine.
        start_may_take: seconds granted until the first step, and for each of the first three, which compile and connect.

    Raises ValueError for a rank or a time that makes no sense, and OSError where the file cannot be made.
    """

    def __init__(
        self, folder: str | Path, *, rank: int | None = None, every: float = 10.0, start_may_take: float = 300.0
    ) -> None:
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ValueError(f"rank={rank!r}: give this rank's number, 0 or more.")
        positive(every=every, start_may_take=start_may_take)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(os.path.abspath(folder), f"rank{rank}")
        self._pace = Pace(float(every), float(start_may_take), time.monotonic())
        self.problem, self._ended, process = "", "", psutil.Process()
        self._numbers: dict[str, float | str] = {}
        self._fixed = {"rank": rank, "pid": process.pid, "born": process.create_time(), "host": socket.gethostname()}
        if hasattr(faulthandler, "register"):  # a handler in C: a rank that is stuck in C answers too
            self._fixed["stack"] = f"rank{rank}.stack"
            # for good: SIGUSR2 ends a process that has no handler
            faulthandler.register(signal.SIGUSR2, open(f"{path}.stack", "w"), all_threads=False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}.json")  # an earlier heartbeat that still writes has the old file to itself
        self._file, self._length = os.open(f"{path}.json", os.O_CREAT | os.O_RDWR, 0o644), 0
        self._write()

    def beat(self, step: int | None = None, phase: str = "", **numbers: float) -> None:
        """The loop came by, at ``step`` (``None``: the same as before), about to begin ``phase`` (backward, say).

        Phases have the same names on every rank. ``numbers`` are shown beside them; a tensor among them is a TypeError,
        for reading one waits for the GPU.
        """
        for name, value in numbers.items():
            if not isinstance(value, Real):
                raise TypeError(f"{name} is a {type(value).__name__}: give a Python number that you have already read.")
            self._numbers[name] = float(value) if math.isfinite(value) else str(float(value))
        self._pace.beat(time.monotonic(), step, phase)
        self._write()

    @contextlib.contextmanager
    def phase(self, name: str, *, may_take: float) -> Iterator[None]:
        """Declare, on every rank that enters it, a phase that takes longer than a heartbeat, ``may_take`` seconds at most.

        Ranks that wait meanwhile for one that has declared are not suspected. Raises ValueError for what is no time.
        """
        positive(may_take=may_take)
        before = self._pace.declare(time.monotonic(), name, float(may_take))
        self._write()
        try:
            yield
        finally:
            self._pace.declare(time.monotonic(), *before)
            self._write()

    def close(self, ended: str = DONE) -> None:
        """The last word: this rank has ended as it should, or by the exception named; what comes later is dropped."""
        if not self._ended:
            self._pace.total += 1
            self._write(ended)
            self._ended = ended
            os.close(self._file)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        good = error is None or (isinstance(error, SystemExit) and not error.code)
        self.close(DONE if good else f"{type(error).__name__}: {error}".strip())

    def _write(self, ended: str = "") -> None:
        if self._ended:
            return
        said = {name: getattr(self._pace, name) for name in ("total", "step", "phase", "turn", "every", "may_take")}
        record = json.dumps({**said, **self._fixed, "ended": ended, "numbers": self._numbers})[:-1].encode()
        # the checksum tells a reader that it met half of this record and half of the one before
        text = (record + CHECKSUM + b"%d}" % zlib.crc32(record)).ljust(self._length)  # spaces cover a longer record
        self._length = len(text)
        try:
            os.pwrite(self._file, text, 0)
            # NFS sends a file to its server, where a watchdog on another machine sees it, when a descriptor is closed
            os.close(os.dup(self._file))
            self.problem = ""
        except OSError as error:
            if not self.problem:
                what = f"heartbeat of rank {self._fixed['rank']}: its file cannot be written ({error})"
                print(f"{what}, so the watchdog may say that it hangs; training goes on.", file=sys.stderr)
            self.problem = str(error)


def trainer_callback(heartbeat: Heartbeat, *, may_take: float = 600.0) -> Any:
    """A callback that makes a Trainer of transformers beat: ``Trainer(..., callbacks=[trainer_callback(heartbeat)])``.

    A save, each batch of an evaluation and the end of the training may take ``may_take`` seconds. Raises ValueError.
    """
    from transformers import TrainerCallback

    positive(may_take=may_take)
    declared = contextlib.ExitStack()

    class Beats(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            declared.close()
            heartbeat.beat(state.global_step, "step")

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            heartbeat.beat()

        on_prediction_step = on_substep_end  # after each batch of an evaluation

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            heartbeat.beat(phase="between steps")
            # declared here, until the next step begins: on_evaluate and on_save are called when it is over
            due = {"evaluating": control.should_evaluate, "saving": control.should_save}
            due["ending"] = control.should_training_stop
            if any(due.values()):
                name = " and ".join(name for name, comes in due.items() if comes)
                declared.enter_context(heartbeat.phase(name, may_take=may_take))

        on_epoch_end = on_step_end  # saves and evaluations of ``eval_strategy="epoch"`` are decided there

    return Beats()
