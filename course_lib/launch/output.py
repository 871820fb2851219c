"""What the ranks print, as it comes: each line tagged with its rank, equal lines of several ranks folded into one."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable

FOLD_SECONDS = 0.15  # how long a line waits for the same line from another rank
# gloo announces every connection on stdout; true, and of no use to anybody
_NOISE = re.compile(r"^\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.")


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``[0]`` -> "rank 0"; ``[0, 1, 2, 5]`` -> "ranks 0-2, 5"."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(parts)


class Stream:
    """Follows the log files of all ranks; :meth:`pump` shows what is new.

    Args:
        folder: the agent's log folder; a rank's files are found anywhere below it as ``<rank>/stdout.log``.
        ranks: how many ranks to follow.
        echo: where a line goes; ``None`` keeps the logs without showing them.
    """

    def __init__(self, folder: str, ranks: int, echo: Callable[[str], None] | None) -> None:
        self._folder, self._ranks, self._echo = folder, ranks, echo
        self._paths: dict[tuple[int, str], str] = {}
        self._offsets: dict[tuple[int, str], int] = {}
        self._waiting: list[tuple[float, str, list[int]]] = []  # (since, line, ranks that said it)
        self.logs: list[str] = [""] * ranks

    def _find(self) -> None:
        for where, _, names in os.walk(self._folder):
            rank = os.path.basename(where)
            for name in names:
                if rank.isdigit() and name in ("stdout.log", "stderr.log"):
                    self._paths[(int(rank), name)] = os.path.join(where, name)

    def pump(self, *, final: bool = False) -> None:
        """Show the lines that are complete and have waited long enough; all of them when ``final``."""
        if len(self._paths) < 2 * self._ranks:
            self._find()
        for (rank, name), path in sorted(self._paths.items()):
            for line in self._new_lines(rank, name, path, final):
                self._take(rank, line)
        now, later = time.monotonic(), []
        for since, line, ranks in self._waiting:
            if final or len(ranks) == self._ranks or now - since > FOLD_SECONDS:
                self._show(line, ranks)
            else:
                later.append((since, line, ranks))
        self._waiting = later

    def _new_lines(self, rank: int, name: str, path: str, final: bool) -> list[str]:
        key = (rank, name)
        with open(path, "rb") as file:
            file.seek(self._offsets.get(key, 0))
            raw = file.read()
        if not final:  # a character may be half written
            raw = raw[: raw.rfind(b"\n") + 1]
        self._offsets[key] = self._offsets.get(key, 0) + len(raw)
        text = raw.decode(errors="replace")
        # a progress bar rewrites its line with carriage returns; its last state is the line
        return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n") if line]

    def _take(self, rank: int, line: str) -> None:
        self.logs[rank] += line + "\n"
        if _NOISE.match(line):
            return
        for _, waiting, ranks in self._waiting:
            if waiting == line and rank not in ranks:
                ranks.append(rank)
                return
        self._waiting.append((time.monotonic(), line, [rank]))

    def _show(self, line: str, ranks: list[int]) -> None:
        if self._echo is not None:
            self._echo(f"[{ranks_in_words(ranks)}] {line}")


def to_cell(line: str) -> None:
    """Print into the running cell at once."""
    print(line)
    sys.stdout.flush()
