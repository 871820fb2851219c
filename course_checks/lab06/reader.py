"""A checkpoint that several ranks saved, each its own rows, and a reader that counts what is read of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch


def save_shard(folder: Path, rank: int, shards: dict[str, torch.Tensor]) -> None:
    """Write this rank's rows of each tensor: raw fp32 in one file, and what lies where in another."""
    index: dict[str, tuple[int, int]] = {}  # name -> (offset in bytes, rows)
    with open(folder / f"rank{rank}.bin", "wb") as file:
        for name, rows in shards.items():
            index[name] = (file.tell(), len(rows))
            file.write(rows.detach().contiguous().float().numpy().tobytes())
    (folder / f"rank{rank}.json").write_text(json.dumps(index))


class ShardReader:
    """Reads rows of a sharded checkpoint.

    Attributes:
        ranks: how many ranks saved it.
        shapes: the shape of each *whole* tensor by name; dimension 0 was cut by the rule of ``torch.chunk``.
        bytes_read: of all calls of :meth:`read` so far.
    """

    def __init__(self, folder: str | Path, ranks: int, shapes: dict[str, tuple[int, ...]]) -> None:
        self.folder, self.ranks, self.shapes = Path(folder), ranks, dict(shapes)
        self.bytes_read = 0
        self._index = [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    def read(self, name: str, saved_rank: int, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (not included) of what rank ``saved_rank`` saved of ``name``, counted from its first."""
        if name not in self.shapes:
            raise ValueError(f"the checkpoint has no {name!r}; it has {', '.join(self.shapes)}")
        if not 0 <= saved_rank < self.ranks:
            raise ValueError(f"{self.ranks} ranks saved this checkpoint; there is no rank {saved_rank}")
        offset, rows = self._index[saved_rank][name]
        if not 0 <= start <= stop <= rows:
            raise ValueError(
                f"rank {saved_rank} of {self.ranks} saved {rows} of the {self.shapes[name][0]} rows of {name!r}, and you "
                f"ask for its rows {start} to {stop}. torch.chunk gives ceil({self.shapes[name][0]} / {self.ranks}) rows to "
                "each rank until none are left"
            )
        shape = (stop - start, *self.shapes[name][1:])
        each, count = 4 * math.prod(self.shapes[name][1:]), math.prod(shape)
        if not count:
            return torch.empty(shape)
        with open(self.folder / f"rank{saved_rank}.bin", "rb") as file:
            file.seek(offset + start * each)
            data = bytearray(file.read(4 * count))
        self.bytes_read += len(data)
        return torch.frombuffer(data, dtype=torch.float32).view(shape)

    def __deepcopy__(self, _: Any) -> ShardReader:
        return self
