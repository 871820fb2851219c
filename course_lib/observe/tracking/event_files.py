"""Write and read TensorBoard's event files: no account, no server; ``tensorboard --logdir FOLDER`` shows ranks as runs."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

Series = list[tuple[int, float, float]]  # of one metric and rank: (step, value, seconds since 1970)


class EventFiles:
    """Writes one rank's event file, through TensorBoard's own records.

    Not through PyTorch's SummaryWriter: its thread holds back what a killed rank would like to have said, and dies
    with a traceback of its own when the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "xb")
        self._records, self._event = RecordWriter(self._file), Event
        self._write(file_version="brain.Event:2")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in numbers.items()]
        self._write(step=step, summary={"value": values})

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: object) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()


def read(folder: str | os.PathLike[str]) -> dict[int, dict[str, Series]]:
    """Return ``{rank: {metric: [(step, value, time), …]}}`` of a folder that `Tracker` wrote event files to.

    Steps in order, each once; where a resumed run did a step again, its later value. ``time`` is in seconds since 1970.

    Raises:
        ValueError: no folder, no rank in it, or ranks without event files.
    """
    place = Path(folder)
    ranks = {
        int(match[1]): path
        for path in place.glob("rank*")
        if path.is_dir() and (match := re.fullmatch(r"rank(\d+)", path.name))
    }
    if not ranks:
        raise ValueError(f"{place} has no folder of a rank (rank0, rank1, …): give the folder that Tracker was given.")
    found = {rank: _read_rank(path) for rank, path in sorted(ranks.items())}
    if not any(found.values()):
        raise ValueError(f"{place} has ranks, and no metric of theirs: did the run log and close its Tracker?")
    return found


def _read_rank(folder: Path) -> dict[str, Series]:
    """Return every scalar of one rank's folder, over all of its files: a restart begins a new one.

    Of a file that ends in the middle of a record, as a killed rank leaves it, what is whole is read.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, Series] = {}
    for path in sorted(folder.glob("*tfevents*")):  # by name, which begins with the time it was opened
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                found.setdefault(value.tag, []).append((event.step, float(number), event.wall_time))
    return {name: _newest_of_each_step(series) for name, series in found.items()}


def _newest_of_each_step(series: Series) -> Series:
    """In the order of steps. A run that resumed from a checkpoint did some steps twice: the later one counts."""
    return [entry for _, entry in sorted({entry[0]: entry for entry in series}.items())]
