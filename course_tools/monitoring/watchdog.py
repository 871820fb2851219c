"""The watchdog: a thread that reads the heartbeats, has them judged, and reports what is new."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from course_lib.observe.heartbeat import read_beats
from course_lib.validation import check_counts, positive
from course_tools.monitoring import webhook as chat
from course_tools.monitoring.judge import LOOKS, RECOVERED, Event, Judge
from course_tools.monitoring.stacks import alive, stacks_of


class Watchdog:
    """Watch the heartbeats in ``folder``, from a notebook or as ``beyond watch``.

    Each sentence is handed to ``tell`` and posted to the webhook; events are kept in ``alarms`` and ``recoveries``. The
    rule is in judge.py. The only signal that is sent is SIGUSR2, to ranks that listen for it, and no process is ended.

    Start to watch before the run, or while it runs: ranks that had ended by then count as an earlier run's.

    Args:
        folder: where the ranks' `Heartbeat` writes; it need not be there yet.
        ranks: number of ranks of the run.
        webhook: URL to post each sentence to; empty for none.
        tell: called with each sentence.
        start_within: seconds until a rank that never wrote a beat is reported.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        ranks: int,
        webhook: str = "",
        tell: Callable[[str], None] = print,
        start_within: float = 120.0,
    ) -> None:
        check_counts(ranks=ranks)
        positive(start_within=start_within)
        if webhook:
            chat.check(webhook)
        self.folder = os.path.abspath(folder)
        self.alarms: list[Event] = []
        self.recoveries: list[Event] = []
        self._webhook, self._tell = webhook, tell
        self._judge = Judge(
            ranks, start_within=start_within, stacks_of=lambda beats: stacks_of(beats, self.folder, 1.0)
        )
        earlier = read_beats(self.folder).items()  # ignored until they change
        self._stale = {rank: beat.identity for rank, beat in earlier if beat.ended or alive(beat) is False}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._posts = ThreadPoolExecutor(1, "webhook")  # a chat that is slow to answer holds nothing up

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._posts.shutdown()  # what is still to be posted gets its time

    @property
    def finished(self) -> bool:
        """True when every rank has ended as it should."""
        return self._judge.finished

    def look(self, now: float) -> None:
        """Read the beats once, and report what is new; ``now`` is of a clock that only goes forward, in seconds."""
        beats = read_beats(self.folder)
        news = {rank: beat for rank, beat in beats.items() if self._stale.get(rank) != beat.identity}
        gone = [rank for rank, beat in news.items() if alive(beat) is False]
        event = self._judge.look(now, news, gone)
        if event is None:
            return
        (self.recoveries if event.kind == RECOVERED else self.alarms).append(event)
        if self._webhook:
            self._posts.submit(chat.deliver, self._webhook, event.sentence, self._say)
        self._say(event.sentence)

    def _watch(self) -> None:
        while not self._stop.wait(min(0.5, max(0.02, self._judge.pace / LOOKS))):
            self.look(time.monotonic())

    def _say(self, sentence: str) -> None:
        with contextlib.suppress(Exception):  # a closed terminal is no reason to stop watching
            self._tell(sentence)
