"""Track how far a loop got and how long its next beat may take. Pure: the time is an argument."""

from __future__ import annotations

import statistics
from collections import deque

from course_lib.observe.heartbeat.beats import NO_STEP

STEPS_A_BEAT = 5.0  # a heartbeat lasts at least this many median steps, so that a slow step is not taken for a hang
WARM_UP = 3  # steps measured before the promise rests on them; the first one compiles, connects and allocates
WINDOW = 16  # steps of the median: it follows sequences that grow longer, and does not follow one slow step


class Pace:
    """The bookkeeping of one rank's beats.

    Args:
        every: shortest heartbeat, seconds.
        start_may_take: seconds granted to the start and to each of the first steps.
        now: any clock that only goes forward, seconds.
    """

    def __init__(self, every: float, start_may_take: float, now: float) -> None:
        self._every, self._start_may_take = every, start_may_take
        self.step, self.phase, self.turn, self.total = NO_STEP, "start", 1, 1
        self.at = now  # of the last beat
        self.declared: float | None = None
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._step_began, self._declared_seconds = now, 0.0
        self._longest_gap = 0.0

    def beat(self, now: float, step: int | None, phase: str) -> None:
        """The loop came by."""
        self._came_by(now, step)
        self.phase, self.turn = phase or self.phase, self.turn + 1

    def declare(self, now: float, phase: str, may_take: float | None) -> tuple[str, float | None]:
        """Begin a long phase, or go back to what was before it. Returns what was before.

        It is no turn of the step: often only one rank saves, and the ranks' turns must stay comparable.
        """
        self._came_by(now, None)
        before = self.phase, self.declared
        self.phase, self.declared = phase, may_take
        return before

    def _came_by(self, now: float, step: int | None) -> None:
        if step is not None and step != self.step:
            if self.step != NO_STEP:
                self._durations.append(now - self._step_began - self._declared_seconds)
            self.step, self.turn = step, 0
            self._step_began, self._declared_seconds = now, 0.0
        if self.declared is None:
            self._longest_gap = max(self._longest_gap, now - self.at)
        else:
            self._declared_seconds += now - self.at
        self.at, self.total = now, self.total + 1

    @property
    def every(self) -> float:
        """Seconds between two beats: as asked for, or longer where steps are: a loop is heard of when it comes by."""
        if len(self._durations) < WARM_UP:
            return self._every
        return max(self._every, STEPS_A_BEAT * statistics.median(self._durations))

    @property
    def may_take(self) -> float | None:
        """Seconds granted to what the loop is in now, where that is more than a heartbeat."""
        if self.declared is not None:
            return self.declared
        return self._start_may_take if len(self._durations) < WARM_UP else None

    def longest_gap(self) -> float:
        """Seconds of the longest silence between two beats, since the last call; declared phases left out."""
        gap, self._longest_gap = self._longest_gap, 0.0
        return gap
