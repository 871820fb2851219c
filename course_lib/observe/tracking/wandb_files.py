"""Weights & Biases without its server: a run a rank, written to files that ``wandb sync`` can send later.

The files are read without W&B's server too: records of its protocol buffers in LevelDB's log format (blocks of 32 KiB;
each piece has a checksum, a length and a type), https://github.com/google/leveldb/blob/main/doc/log_format.md.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from course_lib.observe.tracking.series import Series, newest_of_each_step

BLOCK, HEAD = 32768, struct.Struct("<IHB")  # checksum, length, type of a piece
FULL, FIRST, LAST = 1, 2, 4  # (3 is a piece in the middle)
MAGIC = b":W&B"
HEADER = 7  # bytes before the first piece: the magic, a number, a version
_OWN = ("_step", "_timestamp", "_runtime", "_wandb")  # what W&B adds to each row


class WandbRun:
    """One rank's run; the runs of all ranks form a group."""

    def __init__(self, folder: Path, run_name: str, rank: int, world_size: int, online: bool) -> None:
        import wandb

        self._run = wandb.init(
            project="beyond-one-gpu",
            group=run_name,
            name=f"{run_name}-rank{rank}",
            config={"rank": rank, "world_size": world_size},
            dir=str(folder),
            mode="online" if online else "offline",
            reinit="create_new",  # a notebook may have a run of its own
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, x_save_requirements=False),
        )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def read_wandb_files(folder: Path) -> dict[str, Series]:
    """Every metric of one rank's offline runs; a run that was killed is read as far as it is whole.

    Raises:
        ValueError: a file that is not W&B's.
    """
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Series] = {}
    for path in sorted(folder.glob("wandb/*run-*/*.wandb")):  # by name, which begins with the time it was opened
        for packed in _records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(packed)
            if not record.HasField("history"):
                continue
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = int(row.get("_step", record.history.step.num))
            for name, value in row.items():
                if name not in _OWN and isinstance(value, (int, float, str)):  # "NaN" is a string
                    found.setdefault(name, []).append((step, float(value), float(row.get("_timestamp", 0.0))))
    return {name: newest_of_each_step(series) for name, series in found.items()}


def _records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    if len(data) >= HEADER and not data.startswith(MAGIC):
        raise ValueError(f"{path} is no W&B file: it does not begin with {MAGIC.decode()}.")
    at, begun = HEADER, b""
    while at + HEAD.size <= len(data):
        if BLOCK - at % BLOCK < HEAD.size:  # no piece begins in the last bytes of a block
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEAD.unpack_from(data, at)
        at += HEAD.size
        piece = data[at : at + length]
        at += length
        if kind == 0 or len(piece) < length:  # the rest was never written
            return
        begun = piece if kind in (FULL, FIRST) else begun + piece
        if kind in (FULL, LAST):
            yield begun
