"""What the ranks print, as it comes: each line tagged with its rank, equal lines of several ranks folded into one."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

FOLD_SECONDS = 0.15  # how long a line waits for the same line from another rank
# gloo announces every connection, the memory profiler every older block; true, and of no use to anybody
_NOISE = re.compile(
    r"^\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.|.*CPUAllocator\.cpp:\d+\] Memory block of unk"
)


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


@dataclass
class _Line:
    text: str
    since: float
    ranks: list[int]  # who said it so far


class Stream:
    """Follows the log files of all ranks; :meth:`pump` shows what is new.

    Args:
        folder: the agent's log folder; a rank's files are found anywhere below it as ``<rank>/stdout.log``.
        ranks: how many ranks to follow.
        echo: where lines go, several at a time; ``None`` keeps the logs without showing them.
    """

    def __init__(self, folder: str, ranks: int, echo: Callable[[str], None] | None) -> None:
        self._folder, self._ranks, self._echo = folder, ranks, echo
        self._paths: dict[tuple[int, str], str] = {}
        self._offsets: Counter[tuple[int, str]] = Counter()
        self._queue: deque[_Line] = deque()
        self._open: dict[str, deque[_Line]] = {}  # by text, the lines of the queue that may still find company
        self._said: Counter[tuple[int, str]] = Counter()  # how many of these lines a rank has said already
        self._logs: list[list[str]] = [[] for _ in range(ranks)]

    @property
    def logs(self) -> list[str]:
        """Everything so far, by rank."""
        return ["".join(parts) for parts in self._logs]

    def pump(self, *, final: bool = False) -> None:
        """Show the lines that are complete and have waited long enough; all of them when ``final``."""
        if len(self._paths) < 2 * self._ranks:
            self._find()
        for (rank, name), path in sorted(self._paths.items()):
            for line in self._new_lines(rank, name, path, final):
                self._take(rank, line)
        ready, now = [], time.monotonic()
        # strictly in order: a line that waits for company holds back the younger ones, or a rank's output would mix
        while self._queue and (
            final or len(self._queue[0].ranks) == self._ranks or now - self._queue[0].since > FOLD_SECONDS
        ):
            ready.append(self._close(self._queue.popleft()))
        if ready and self._echo is not None:
            self._echo("\n".join(ready))

    def _find(self) -> None:
        for where, _, names in os.walk(self._folder):
            rank = os.path.basename(where)
            for name in names:
                if rank.isdigit() and name in ("stdout.log", "stderr.log"):
                    self._paths[(int(rank), name)] = os.path.join(where, name)

    def _new_lines(self, rank: int, name: str, path: str, final: bool) -> list[str]:
        with open(path, "rb") as file:
            file.seek(self._offsets[rank, name])
            raw = file.read()
        if not final:  # the last line, or a character, may be half written
            raw = raw[: raw.rfind(b"\n") + 1]
        self._offsets[rank, name] += len(raw)
        return re.findall(r"[^\n]*\n|[^\n]+", raw.decode(errors="replace"))

    def _take(self, rank: int, line: str) -> None:
        end = "\n" if line.endswith("\n") else ""
        # a progress bar rewrites its line with carriage returns; its last state is the line
        text = line.rstrip("\r\n").rsplit("\r", 1)[-1]
        if _NOISE.match(text):
            return
        self._logs[rank].append(text + end)
        if not text.strip():
            return
        same = self._open.setdefault(text, deque())
        nth = self._said[rank, text]
        self._said[rank, text] += 1
        if nth < len(same):  # somebody said it as often before: this rank joins in
            same[nth].ranks.append(rank)
            return
        same.append(_Line(text, time.monotonic(), [rank]))
        self._queue.append(same[-1])

    def _close(self, line: _Line) -> str:
        same = self._open[line.text]
        same.popleft()  # equal lines leave in the order in which they came
        if not same:
            del self._open[line.text]
        for rank in line.ranks:
            self._said[rank, line.text] -= 1
            if not self._said[rank, line.text]:
                del self._said[rank, line.text]
        return f"[{ranks_in_words(line.ranks)}] {line.text}"


def to_cell(text: str) -> None:
    """Print into the running cell at once."""
    print(text)
    sys.stdout.flush()
