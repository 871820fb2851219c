"""One small file per rank, never half written: how far it got, and by when its next beat is due."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from course_lib.files import write_atomically

DONE = "done"
NO_STEP = -1  # the rank is there and has begun no step yet
_NAME = re.compile(r"rank(\d+)\.json")


@dataclass(frozen=True)
class Beat:
    """What one rank last said.

    Attributes:
        rank: who.
        step, phase: how far its training loop got; ``NO_STEP`` before the first.
        turn: which beat of this step it is, from 1. Ranks run the same program, so ``position`` orders them.
        total: beats since this process began.
        age: seconds from the beat to the writing of the file, both by the writer's clock.
        every: seconds between two beats that the rank promises at the moment.
        may_take: seconds that it asked for, for a phase that it declared long; ``None`` outside of one.
        ended: ``""`` while it runs, ``"done"``, or the exception that ended it.
        pid, born, host: the process; ``born`` is its start as the system tells it, so that a reused pid is no mistake.
        time: the writer's wall clock, for people only: no rule reads it.
        stack: name of the file that the rank writes its Python stack into on SIGUSR2; ``""`` where it cannot.
        numbers: what the loop added (loss, tokens per second, …).
    """

    rank: int
    step: int = NO_STEP
    phase: str = "start"
    turn: int = 1
    total: int = 1
    age: float = 0.0
    every: float = 1.0
    may_take: float | None = None
    ended: str = ""
    pid: int = 0
    born: float = 0.0
    host: str = ""
    time: float = 0.0
    stack: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.turn

    @property
    def identity(self) -> tuple[int, float, int, str]:
        """Another one means that the rank has come further, or that another process has taken its place."""
        return self.pid, self.born, self.total, self.ended

    @property
    def process(self) -> tuple[int, float, str]:
        return self.pid, self.born, self.host

    @property
    def place(self) -> str:
        """``step 15, backward``"""
        if self.step == NO_STEP:
            return self.phase
        return f"step {self.step}, {self.phase}" if self.phase else f"step {self.step}"


def write_beat(folder: str | os.PathLike[str], beat: Beat) -> None:
    """Replace the rank's file in one step: a reader sees the old beat or the new one. Raises OSError."""
    write_atomically(os.path.join(folder, f"rank{beat.rank}.json"), json.dumps(asdict(beat)))


def read_beats(folder: str | os.PathLike[str]) -> dict[int, Beat]:
    """The last beat of each rank that has written one. A file that cannot be read just now is left out."""
    found = {}
    for path in Path(folder).glob("rank*.json"):
        match = _NAME.fullmatch(path.name)
        if not match:
            continue
        try:
            beat = Beat(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # replaced under our hands on a shared file system, or somebody else's
            continue
        found[int(match[1])] = beat
    return found
