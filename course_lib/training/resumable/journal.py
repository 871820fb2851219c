"""A run's journal: one line of JSON for each start, step, spike and save, appended to a file beside the checkpoints.

A run that is killed and resumed appends to the same file. Steps after the last checkpoint then appear twice; the later line
counts, because the earlier work was lost. A line cut short by a kill is ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

NAME = "journal.jsonl"
Event = dict[str, Any]


class Journal:
    """Rank 0 writes, every rank remembers; without a folder nothing is written.

    Where the disk is full, training goes on: it is told once, and what is missing is written when there is room again.

    Attributes:
        events: of this run, those before the resume included.
    """

    def __init__(self, folder: str, rank: int, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)
        self._file: FileIO | None = None
        self._waiting: list[str] = []
        if folder and rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = FileIO(Path(folder, NAME), "a+")
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(0, size - 1))
            self._torn = self._file.read(1) not in (b"", b"\n")

    def write(self, event: str, **about: Any) -> None:
        """Add a line; it outlives this process at once, and a loss of power from the next ``to_disk`` on."""
        self.events.append({"event": event, **about})
        if self._file is None:
            return
        self._waiting.append(json.dumps(self.events[-1]) + "\n")
        lines = ("\n" * self._torn + "".join(self._waiting)).encode()
        try:
            self._torn = self._file.write(lines) != len(lines)
        except OSError as error:
            if len(self._waiting) == 1:
                print(f"{self._file.name}: {error.strerror}. Training goes on; the journal follows when there is room.")
            return
        if not self._torn:
            self._waiting.clear()

    def to_disk(self) -> None:
        """Wait until the disk has every line: before a checkpoint is saved that goes on from here."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read(folder: str | os.PathLike[str]) -> list[Event]:
    """The events in a folder's journal; none where there is no journal."""
    try:
        lines = Path(folder, NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _parsed(line))]


def _parsed(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:  # cut short by a kill
        return None
    return event if isinstance(event, dict) and "event" in event else None


def steps_that_count(events: Iterable[Event]) -> dict[int, Event]:
    """The event of each update, by step; where a resume or a roll-back went back, only what was done afterwards."""
    steps: dict[int, Event] = {}
    for event in events:
        if event["event"] == "step":
            steps[event["step"]] = event
        elif event["event"] in ("start", "rollback"):
            steps = {step: told for step, told in steps.items() if step < event["step"]}
    return steps
