"""The watchdog: a thread that reads the heartbeats, judges them, and reports alarms."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from course_lib.observe.heartbeat import Beat, read_beats
from course_lib.validation import positive
from course_tools.monitoring import alarms, stacks
from course_tools.monitoring.alarms import Alarm, Recovery
from course_tools.monitoring.judge import LOOKS, Judge
from course_tools.monitoring.webhook import Messenger

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks


class Watchdog:
    """Watch the heartbeats in ``folder``, from a notebook or as ``beyond watch``.

    Each sentence is handed to ``tell``, kept in ``alarms`` and ``recoveries``, and posted to the webhook. The rule is in
    judge.py. The only signal that is sent is SIGUSR2, to ranks that listen for it, and no process is ended. The threads
    end with the context.

    Start to watch before the run, or while it runs: ranks that had ended by then count as an earlier run's.

    Args:
        folder: where the ranks' `Heartbeat` writes; it need not be there yet.
        ranks: number of ranks of the run.
        webhook: URL to post each sentence to; empty for none.
        tell: called with each sentence.
        start_within: seconds until a rank that never wrote a beat is reported.
        name: of the run, put before each sentence that is posted.
        messenger: options of the webhook's `Messenger`: timeout (seconds), attempts, back_off (seconds).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        ranks: int,
        webhook: str = "",
        tell: Callable[[str], None] = print,
        start_within: float = 120.0,
        name: str = "",
        **messenger: Any,
    ) -> None:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"ranks={ranks!r}: give the number of ranks to watch, 1 or more.")
        positive(start_within=start_within)
        self.folder, self.ranks, self.name = os.path.abspath(folder), ranks, name
        self.alarms: list[Alarm] = []
        self.recoveries: list[Recovery] = []
        self.problem = ""  # why `tell` failed the last time
        self._tell, self._start_within, self._host = tell, start_within, socket.gethostname()
        self._messenger = Messenger(webhook, tell, **messenger) if webhook else None
        self._stop = threading.Event()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        beats = read_beats(self.folder)  # also those of an earlier run, which are ignored until they change
        self._stale = {rank: beat.identity for rank, beat in beats.items() if beat.ended or not self._alive(beat)}
        self._judge = Judge(ranks, time.monotonic(), start_within=start_within)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._messenger is not None:
            self._messenger.close()

    @property
    def beats(self) -> dict[int, Beat]:
        """The last beat of each rank."""
        return self._judge.beats

    def ages(self) -> dict[int, float]:
        """Seconds since each rank's last sign of life, by this process's clock."""
        return self._judge.ages(time.monotonic())

    @property
    def finished(self) -> bool:
        """True when every rank has ended as it should."""
        return self._judge.finished

    def wait(self, timeout: float) -> Alarm | None:
        """The first alarm, as soon as there is one; None when ``timeout`` seconds brought none."""
        with self._news:
            self._news.wait_for(lambda: self.alarms, timeout)
            return self.alarms[0] if self.alarms else None

    def _watch(self) -> None:
        while not self._stop.wait(self._pause()):
            beats = {rank: beat for rank, beat in read_beats(self.folder).items() if self._is_news(rank, beat)}
            for event in self._judge.look(time.monotonic(), beats, self._alive):
                if isinstance(event, Alarm):
                    event = self._with_stacks(event) if event.kind == alarms.HUNG else event
                self._announce(event)

    def _pause(self) -> float:
        shortest = min((beat.every for beat in self._judge.beats.values()), default=1.0)
        return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, shortest / LOOKS))

    def _is_news(self, rank: int, beat: Beat) -> bool:
        if self._stale.get(rank) == beat.identity:
            return False
        self._stale.pop(rank, None)
        return True

    def _alive(self, beat: Beat) -> bool | None:
        return stacks.alive(beat, self._host)

    def _with_stacks(self, alarm: Alarm) -> Alarm:
        """Add where the hung rank is. Of ranks that the beats cannot tell apart, the one that does not wait is the cause."""
        beats = self._judge.beats
        seconds = min(1.0, max(0.2, beats[alarm.rank].every / LOOKS))
        found = stacks.ask([beats[rank] for rank in alarm.suspects], self.folder, self._host, seconds)
        busy = [rank for rank, stack in found.items() if not stacks.waits(stack)]
        if busy and alarm.rank not in busy:
            since = self._judge.ages(time.monotonic())[busy[0]]
            alarm = alarms.hung(beats[busy[0]], since, alarm.suspects, list(beats.values()))
            self._judge.blame(alarm)
        stack = found.get(alarm.rank)
        return alarms.with_stack(alarm, stack, stacks.where(stack)) if stack else alarm

    def _announce(self, event: Alarm | Recovery) -> None:
        with self._news:
            (self.alarms if isinstance(event, Alarm) else self.recoveries).append(event)
            self._news.notify_all()
        text = f"{self.name}: {event.sentence}" if self.name else event.sentence
        if self._messenger is not None:  # first, because it cannot fail
            self._messenger.send(text)
        try:
            self._tell(event.sentence)
        except Exception as error:  # a closed terminal is no reason to stop watching
            self.problem = f"{type(error).__name__}: {error}"
