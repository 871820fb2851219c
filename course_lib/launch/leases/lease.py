"""A lease of GPUs: take a ticket, wait, take the GPUs, give them back."""

from __future__ import annotations

import getpass
import os
import threading
import time
from collections.abc import Callable

from course_lib.launch.leases import files, messages
from course_lib.launch.leases.state import Holder, PoolState

NAME_VARIABLE = "BEYOND_ONE_GPU_NAME"
LOOK, RARELY = 0.05, 0.5  # seconds between two looks of the first in the queue, and of one far behind it
TELL_SECONDS = 2.0  # at least, between two sentences of one wait


class NoTurn(TimeoutError):
    """The turn did not come within the seconds that the caller would wait."""


_live: list[Lease] = []  # of this process


class Lease:
    """Some GPUs of a pool, from :meth:`take` to :meth:`give_back` or the end of the process.

    Attributes:
        gpus: their numbers in nvidia-smi; empty while the lease is not taken.
        waited: seconds from asking to having them.
    """

    def __init__(
        self,
        pool: PoolState | None,
        n: int,
        *,
        name: str = "",
        wait: float | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.gpus: tuple[int, ...] = ()
        self.waited = 0.0
        self.name = files.plain_name(name or os.environ.get(NAME_VARIABLE, "") or _user())
        self._pool, self._n, self._wait, self._tell = pool, n, wait, tell
        self._locks: list[int] = []
        self._seat: int | None = None
        self._thread: threading.Thread | None = None  # who took it; a thread's number is given again once it has ended

    @property
    def environment(self) -> dict[str, str]:
        """What shows a program these GPUs, and no others. PyTorch then calls them cuda:0, cuda:1, …"""
        if not self.gpus:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Of the locked files. The lease lasts until all copies are closed: a command that inherits them keeps it."""
        return tuple(self._locks)

    def take(self) -> Lease:
        """Wait for one's turn, and take the GPUs. Raises as :meth:`Pool.lease` says."""
        pool = self._pool
        if pool is None:
            return self
        self._check(pool)
        began = time.monotonic()
        self._thread = threading.current_thread()
        _live.append(self)
        try:
            pool.make()
            self._wait_for_turn(pool, began)
        except BaseException:
            self.give_back()
            raise
        finally:
            self._stand_up()
        self.waited = time.monotonic() - began
        return self

    def give_back(self) -> None:
        """Give the GPUs back; a second call does nothing."""
        self.gpus = ()
        self._release()
        if self in _live:
            _live.remove(self)

    def _release(self) -> None:
        while self._locks:
            files.unlock(self._locks.pop())

    def __enter__(self) -> Lease:
        return self.take()

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def _check(self, pool: PoolState) -> None:
        if isinstance(self._n, bool) or not isinstance(self._n, int) or self._n < 1:
            raise ValueError(f"a lease of {self._n!r} GPUs: ask for 1 or more.")
        if self._n > pool.gpus:
            raise ValueError(
                f"a lease of {self._n} GPUs, and the class shares {pool.gpus}: ask for {pool.gpus} or fewer."
            )
        wait = self._wait
        if wait is not None and (isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < 1e9):
            raise ValueError(f"wait={wait!r}: give the seconds to wait at most, 0 or more, or None.")
        if any(lease._thread is threading.current_thread() and lease._pool.folder == pool.folder for lease in _live):
            raise ValueError(
                "This process holds a lease already, and who holds one may not wait for another: two such learners could "
                "wait for each other for ever. Ask for all the GPUs at once, or end the first lease before."
            )

    def _wait_for_turn(self, pool: PoolState, began: float) -> None:
        number, reported, reported_at = 0, None, began - TELL_SECONDS
        while True:
            with pool.door():
                if self._seat is None:
                    number = self._sit_down(pool)
                holders, queue = pool.look()
                before = queue[: next((i for i, t in enumerate(queue) if t.number == number), None)]
                if self._seat is not None and not before and self._take_free(pool, holders):
                    break
            now = time.monotonic()
            if self._wait is not None and now - began >= self._wait:
                raise NoTurn(messages.no_turn(self._n, pool.gpus, self._wait, holders, before))
            state = (holders, [t.number for t in before])
            if state != reported and now - reported_at >= TELL_SECONDS:
                self._tell(messages.waiting(self._n, pool.gpus, holders, before))
                reported, reported_at = state, now
            time.sleep(min(LOOK * (1 + len(before)), RARELY))
        if reported is not None:
            self._tell(messages.your_turn(self.gpus, time.monotonic() - began))

    def _sit_down(self, pool: PoolState) -> int:
        """Take a ticket and the first seat that is free; with none free, stand until the next look."""
        number = time.monotonic_ns()  # read behind the door, so no two are equal
        for seat in range(files.SEATS):
            self._seat = files.lock(pool.folder, files.seat_file(seat))
            if self._seat is not None:
                record = {
                    "number": number,
                    "name": self.name,
                    "pid": os.getpid(),
                    "wants": self._n,
                    "since": time.time(),
                }
                files.write_record(self._seat, record)
                break
        return number

    def _stand_up(self) -> None:
        if self._seat is not None:
            files.unlock(self._seat)
            self._seat = None

    def _take_free(self, pool: PoolState, holders: list[Holder]) -> bool:
        """All that it wants, or none."""
        free = sorted(set(range(pool.gpus)) - {h.gpu for h in holders})[: self._n]
        if len(free) < self._n:
            return False
        for gpu in free:
            lock = files.lock(pool.folder, files.gpu_file(gpu))
            if lock is None:  # somebody locks files here by means of their own
                self._release()
                return False
            self._locks.append(lock)
            files.write_record(lock, {"name": self.name, "pid": os.getpid(), "since": time.time()})
        self.gpus = tuple(free)
        self._stand_up()  # behind the door: nobody sees both
        return True


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, in a container
        return f"user {os.getuid()}"
