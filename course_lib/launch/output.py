"""Show what the ranks print as it comes: each line tagged with its rank, equal lines of several ranks folded into one."""

from __future__ import annotations

import os
import re
import sys
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

FOLD_SECONDS = 0.15  # how long a line waits for the same line from another rank
TAIL, WIDTH = 1000, 500  # lines that are kept for the report of a failure, and characters of each
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
    ranks: list[int]  # who said it so far
    number: int = 0  # its place in the queue
    since: float = 0.0
    before: list[_Line] = field(default_factory=list)  # what some of its ranks said between the line above and this one


class Stream:
    """Follows the log files of all ranks; :meth:`pump` shows what is new.

    Args:
        folder: the agent's log folder; a rank's files are found anywhere below it as ``<rank>/stdout.log``.
        ranks: how many ranks to follow.
        echo: where lines go, several at a time; ``None`` keeps the logs without showing them.

    Attributes:
        tail: the last lines, as shown or as they would have been.
    """

    def __init__(self, folder: str, ranks: int, echo: Callable[[str], None] | None) -> None:
        self._folder, self._ranks, self._echo = folder, ranks, echo
        self._paths: dict[tuple[int, str], str] = {}
        self._offsets: Counter[tuple[int, str]] = Counter()
        self._queue: deque[_Line] = deque()
        self._open: dict[str, deque[_Line]] = {}  # by text, the lines of the queue that may still find company
        self._taken = 0  # lines so far
        self._place: Counter[tuple[int, str]] = Counter()  # of the line of the queue that a rank said last in a file
        self._logs: list[list[str]] = [[] for _ in range(ranks)]
        self.tail: deque[str] = deque(maxlen=TAIL)

    @property
    def logs(self) -> list[str]:
        """Everything so far, by rank."""
        return ["".join(parts) for parts in self._logs]

    def pump(self, *, final: bool = False) -> None:
        """Show the lines that are complete and have waited long enough; all of them when ``final``."""
        if len(self._paths) < 2 * self._ranks:
            self._find()
        for (rank, name), path in sorted(self._paths.items()):
            self._take(rank, name, self._new_lines(rank, name, path, final))
        ready, now = [], time.monotonic()
        # strictly in order: a line that waits for company holds back the younger ones, or a rank's output would mix
        while self._queue and (
            final or len(self._queue[0].ranks) == self._ranks or now - self._queue[0].since > FOLD_SECONDS
        ):
            ready += self._close(self._queue.popleft())
        self.tail += [line[:WIDTH] for line in ready]
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

    def _take(self, rank: int, name: str, lines: list[str]) -> None:
        alone: list[str] = []  # since the last line that this rank shares with another
        for line in lines:
            end = "\n" if line.endswith("\n") else ""
            # a progress bar rewrites its line with carriage returns; its last state is the line
            text = line.rstrip("\r\n").rsplit("\r", 1)[-1]
            if _NOISE.match(text):
                continue
            self._logs[rank].append(text + end)
            if not text.strip():
                continue
            # a rank joins a line only below its own last one of this file, or its output would be shown out of order
            same = self._open.get(text, ())
            nth = bisect_right(same, self._place[rank, name], key=lambda line: line.number)
            if nth < len(same):
                _put_before(same[nth], rank, alone)
                alone = []
                same[nth].ranks.append(rank)
                self._place[rank, name] = same[nth].number
            else:
                alone.append(text)
        for text in alone:
            self._taken += 1
            line = _Line(text, [rank], self._taken, time.monotonic())
            self._open.setdefault(text, deque()).append(line)
            self._queue.append(line)
            self._place[rank, name] = line.number

    def _close(self, line: _Line) -> list[str]:
        same = self._open[line.text]
        same.popleft()  # equal lines leave in the order in which they came
        if not same:
            del self._open[line.text]
        return [f"[{ranks_in_words(shown.ranks)}] {shown.text}" for shown in (*line.before, line)]


def _put_before(line: _Line, rank: int, texts: list[str]) -> None:
    """Between `line` and the one above it, folded with what other ranks said there."""
    start = 0
    for text in texts:
        found = next((i for i in range(start, len(line.before)) if line.before[i].text == text), len(line.before))
        if found == len(line.before):
            line.before.append(_Line(text, []))
        line.before[found].ranks.append(rank)
        start = found + 1


def to_cell(text: str) -> None:
    """Print into the running cell at once."""
    print(text)
    sys.stdout.flush()
