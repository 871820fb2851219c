"""The watchdog: a thread that reads the heartbeats, and tells people what the rule found."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from course_lib.observe.heartbeat.beats import Beat, read_beats
from course_lib.observe.heartbeat.position import newest
from course_lib.observe.heartbeat.writer import check_seconds
from course_tools.monitoring import alarm as sentences
from course_tools.monitoring import stacks
from course_tools.monitoring.alarm import Alarm, Recovery
from course_tools.monitoring.rule import LOOKS, Judge
from course_tools.monitoring.webhook import Messenger

SHORTEST, LONGEST = 0.02, 0.5  # seconds between two looks


class Watchdog:
    """Watches the heartbeats in ``folder``, from a notebook or as ``beyond watch``.

    What it says is printed by ``tell``, kept in ``alarms`` and ``recoveries``, and posted to the webhook. It judges by
    the rule of rule.py, sends no signal but SIGUSR2 to ranks that listen for it, and ends nothing. Its threads end with
    the context.

    Begin to watch before the run, or while it runs: what had ended by then counts as an earlier run's.

    Args:
        folder: where the ranks' `Heartbeat` writes; it need not be there yet.
        ranks: how many ranks the run has.
        webhook: URL to post each sentence to; empty for none.
        tell: takes each sentence.
        start_within: seconds until a rank that was never heard of is reported.
        name: of the run, put before each sentence that is posted.
        messenger: options of the webhook's `Messenger`: timeout (seconds), attempts, back_off (seconds).

    Raises:
        ValueError: ranks or seconds that make no sense, a webhook that is no URL.
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
        check_seconds("start_within", start_within)
        self.folder, self.ranks, self.name = os.path.abspath(folder), ranks, name
        self.alarms: list[Alarm] = []
        self.recoveries: list[Recovery] = []
        self.problem = ""  # why the last sentence could not be told
        self._tell, self._start_within, self._host = tell, start_within, socket.gethostname()
        self._messenger = Messenger(webhook, tell, **messenger) if webhook else None
        self._stop = threading.Event()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        there = read_beats(self.folder)  # also those of an earlier run, which are no news until they change
        self._stale = {rank: beat.identity for rank, beat in there.items() if beat.ended or not self._alive(beat)}
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

    # ------------------------------------------------------------------------------------------------ the thread
    def _watch(self) -> None:
        while not self._stop.wait(self._pause()):
            there = read_beats(self.folder)
            beats = {r: newest(beat, self.folder) for r, beat in there.items() if self._is_news(r, beat)}
            for event in self._judge.look(time.monotonic(), beats, self._alive):
                if isinstance(event, Alarm):
                    event = self._with_stacks(event) if event.kind == sentences.HUNG else event
                self._announce(event)

    def _pause(self) -> float:
        shortest = min((beat.every for beat in self._judge.beats.values()), default=1.0)
        return min(LONGEST, max(SHORTEST, shortest / LOOKS))

    def _is_news(self, rank: int, beat: Beat) -> bool:
        if self._stale.get(rank) == beat.identity:
            return False
        self._stale.pop(rank, None)
        return True

    def _alive(self, beat: Beat) -> bool | None:
        return stacks.alive(beat, self._host)

    def _with_stacks(self, alarm: Alarm) -> Alarm:
        """Where the hung rank is. Of ranks that the beats cannot tell apart, the one that does not wait is the cause."""
        beats = self._judge.beats
        patience = min(1.0, max(0.2, beats[alarm.rank].every / LOOKS))
        found = stacks.ask([beats[rank] for rank in alarm.suspects], self.folder, self._host, patience)
        busy = [rank for rank, stack in found.items() if not stacks.waits(stack)]
        if busy and alarm.rank not in busy:
            since = self._judge.ages(time.monotonic())[busy[0]]
            alarm = sentences.hung(beats[busy[0]], since, alarm.suspects, list(beats.values()))
            self._judge.blame(alarm)
        stack = found.get(alarm.rank)
        return sentences.with_stack(alarm, alarm.rank, stack, stacks.where(stack)) if stack else alarm

    def _announce(self, event: Alarm | Recovery) -> None:
        with self._news:
            (self.alarms if isinstance(event, Alarm) else self.recoveries).append(event)
            self._news.notify_all()
        text = f"{self.name}: {event.sentence}" if self.name else event.sentence
        if self._messenger is not None:  # first: it cannot fail
            self._messenger.send(text)
        try:
            self._tell(event.sentence)
        except Exception as error:  # a closed screen is no reason to stop watching
            self.problem = f"{type(error).__name__}: {error}"
