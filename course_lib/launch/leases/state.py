"""The state of a pool: who has which GPU, who waits, and whose turn it is.

First come, first served, and nobody overtakes: whoever asks takes a ticket, and only the first in the queue may take GPUs.
If it wants two it takes both in one step and holds none before, so two learners never wait for each other, and somebody who
wants two is not starved by those who want one. The first is who asked first among those whose name holds nothing yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from course_lib.launch.leases import files
from course_lib.launch.leases.machine import count_gpus

SHUT_SECONDS = 10.0  # the door is open again after milliseconds, unless its holder was stopped in it


@dataclass(frozen=True)
class Holder:
    """Who has a GPU. `since` in seconds since 1970; name "somebody", and None, where the record is damaged."""

    gpu: int
    name: str
    pid: int | None
    since: float | None


@dataclass(frozen=True)
class Ticket:
    """Who waits, for how many GPUs, since when (seconds since 1970). `number` orders them."""

    number: int
    name: str
    pid: int
    wants: int
    since: float
    seat: int


class PoolState:
    """Who has which GPU of a pool and who waits, as the files in its folder say. See `Pool` for the arguments."""

    def __init__(self, folder: str | os.PathLike[str], gpus: int | None = None) -> None:
        if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= 64):
            raise ValueError(f"gpus={gpus!r}: give the number of GPUs of this machine, 1 to 64, or leave it out.")
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self._asked = gpus
        self._known: int | None = None

    @property
    def gpus(self) -> int:
        """How many GPUs the pool lends. Raises ValueError where that cannot be told, or contradicts the folder."""
        return self._there() or self._asked or count_gpus()

    def make(self) -> None:
        """Make the folder and its files, where they are missing. Raises ValueError where it cannot be."""
        if self._there() is None:
            try:
                files.make(self.folder, self.gpus)
            except OSError as error:
                raise ValueError(f"{self.folder} cannot be made ({error.strerror}): choose another folder.") from None
            self._there()  # which refuses a network file system

    def _there(self) -> int | None:
        if self._known is None:
            self._known = files.gpus_in(self.folder)
            if None not in (self._asked, self._known) and self._asked != self._known:
                raise ValueError(
                    f"{self.folder} was made for {self._known} GPUs, not for {self._asked}: leave the number out."
                )
        return self._known

    def holders(self) -> list[Holder]:
        """Who has which GPU now, by GPU; those that are free are not in it. Raises ValueError without a folder."""
        with self.door():
            return self.look()[0]

    def waiting(self) -> list[Ticket]:
        """Who waits, whose turn comes first before the others. Raises ValueError without a folder."""
        with self.door():
            return self.look()[1]

    @contextmanager
    def door(self) -> Iterator[None]:
        """Alone among all processes, for a moment."""
        if self._there() is None:
            raise ValueError(f"{self.folder} holds no pool of GPUs: beyond class gpus init {self.folder}")
        give_up = time.monotonic() + SHUT_SECONDS
        while (door := files.lock(self.folder, files.DOOR)) is None:
            if time.monotonic() > give_up:
                raise ValueError(
                    f"{self.folder}/door has been shut for {SHUT_SECONDS:g} s: some process was stopped in it (Ctrl-Z?); "
                    f"`fuser {self.folder}/door` tells which."
                )
            time.sleep(0.002)
        try:
            yield
        finally:
            files.unlock(door)

    def look(self) -> tuple[list[Holder], list[Ticket]]:
        """Both of them, for who has the door."""
        holders = self._holders()
        return holders, self._queue({holder.name for holder in holders})

    def _holders(self) -> list[Holder]:
        found = []
        for gpu in range(self.gpus):
            locked, data = files.look(self.folder, files.gpu_file(gpu))
            if locked:
                record = files.read_record(data, {"name": str, "pid": int, "since": float}) or {"name": "somebody"}
                found.append(Holder(gpu, record["name"], record.get("pid"), record.get("since")))
        return found

    def _queue(self, with_something: set[str]) -> list[Ticket]:
        kinds: dict[str, type] = {"number": int, "name": str, "pid": int, "wants": int, "since": float}
        found = []
        for seat in range(files.SEATS):
            locked, data = files.look(self.folder, files.seat_file(seat))
            if not data:  # nobody ever sat here, nor on those behind: everybody takes the first that is free
                break
            record = files.read_record(data, kinds) if locked else None
            if record:
                found.append(Ticket(**record, seat=seat))
        return sorted(found, key=lambda t: (t.name in with_something, t.number))
