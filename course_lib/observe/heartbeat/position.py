"""Keep a rank's exact position in 72 bytes of a file, so that it is known even after a SIGKILL.

The JSON beat is written once in a heartbeat; a rank that is killed between two would be reported a heartbeat behind
where it was. A write of a few bytes into the page cache costs the loop 2 microseconds. (Not a memory map: on a full
disk that would end the process.)
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import replace
from pathlib import Path

from course_lib.observe.heartbeat.beats import Beat

_LAYOUT = struct.Struct("<qqqq32sq")  # total, pid, step, turn, phase, total again: a torn read shows


class Position:
    """The writer's side; ``folder`` is there already. Raises OSError."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file = os.open(os.path.join(folder, f"rank{rank}.position"), os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
        self._pid = os.getpid()

    def write(self, step: int, turn: int, total: int, phase: str) -> None:
        packed = _LAYOUT.pack(total, self._pid, step, turn, phase.encode()[:32], total)
        with contextlib.suppress(OSError):  # a full disk: the thread that writes the beat reports it
            os.pwrite(self._file, packed, 0)

    def close(self) -> None:
        file, self._file = self._file, -1  # a number that was closed may be somebody else's file by now
        if file != -1:
            os.close(file)


def newest(beat: Beat, folder: str | os.PathLike[str]) -> Beat:
    """The beat, brought up to where its rank is now; as it is where there is nothing newer of the same process."""
    try:
        packed = (Path(folder) / f"rank{beat.rank}.position").read_bytes()
    except OSError:
        return beat
    if len(packed) != _LAYOUT.size:
        return beat
    total, pid, step, turn, phase, again = _LAYOUT.unpack(packed)
    if total != again or pid != beat.pid or total <= beat.total or beat.ended:
        return beat
    return replace(beat, step=step, turn=turn, total=total, age=0.0, phase=phase.rstrip(b"\0").decode(errors="replace"))
