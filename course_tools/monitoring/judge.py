"""The rule that turns silence into an alarm: within two missed heartbeats, and not for a single slow step.

A `Judge` is told the time, the beats and which processes are alive, so that tests can play hundreds of runs to it.

1. Each rank has a limit: 1.6 heartbeats of the length that it announces itself, or the seconds that it declared for a
   long phase. The judge looks ten times per heartbeat, so the alarm comes before two heartbeats have passed since the
   rank's last sign of life. A heartbeat lasts at least 5 median steps (see heartbeat.py), so a healthy step may take more
   than 7 times the median.
2. In lockstep, one hung rank silences all. Only the rank furthest behind is judged: the others wait for it.
3. A rank in a declared phase, within its seconds, excuses the ranks that wait for it; their limit starts again after it.
4. A rank whose process is gone before it said "done" is dead, at once. One that never wrote a beat has never started.
5. One alarm per incident: other ranks that fall silent or die meanwhile count as its consequences. The incident is over
   when its rank, and every rank that died meanwhile, beats again.
6. Silence is measured by the reader's clock, from when a file changed: clocks of two machines are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from course_lib.observe.heartbeat import DONE, Beat
from course_tools.monitoring import alarms
from course_tools.monitoring.alarms import Alarm, Recovery

LIMIT = 1.6  # heartbeats of silence
LOOKS = 10.0  # looks per heartbeat

Alive = Callable[[Beat], bool | None]  # None: the process is on another machine


@dataclass
class _Rank:
    beat: Beat
    since: float  # the reader's time of its last sign of life
    begun: float  # when its limit started: the same time, or later after another rank's declared phase

    def silence(self, now: float) -> float:
        return now - self.begun

    @property
    def limit(self) -> float:
        return self.beat.may_take if self.beat.may_take is not None else LIMIT * self.beat.every


@dataclass
class _Incident:
    alarm: Alarm
    began: float
    waits_for: dict[int, tuple] = field(default_factory=dict)  # rank -> its beat then; over when all have another


class Judge:
    """Judge the ranks of one run, look by look.

    Args:
        ranks: how many there should be.
        now: the reader's clock, seconds.
        start_within: seconds until a rank that never wrote a beat is reported.
    """

    def __init__(self, ranks: int, now: float, *, start_within: float = 120.0) -> None:
        self.ranks, self._start_within = ranks, start_within
        self._began = self._looked = now
        self._known: dict[int, _Rank] = {}
        self._incident: _Incident | None = None

    @property
    def beats(self) -> dict[int, Beat]:
        return {rank: known.beat for rank, known in sorted(self._known.items())}

    @property
    def finished(self) -> bool:
        """True when every rank has said that it is done."""
        return len(self._known) == self.ranks and all(known.beat.ended == DONE for known in self._known.values())

    def ages(self, now: float) -> dict[int, float]:
        """Seconds since each rank's last sign of life."""
        return {rank: now - known.since for rank, known in sorted(self._known.items())}

    def look(self, now: float, beats: Mapping[int, Beat], alive: Alive) -> list[Alarm | Recovery]:
        """Look at the beats as they are now, and return what is new: an alarm, a recovery, mostly nothing."""
        self._discount_own_sleep(now)
        for rank, beat in beats.items():
            known = self._known.get(rank)
            if not 0 <= rank < self.ranks:
                continue
            if known is None or known.beat.identity != beat.identity:
                self._known[rank] = _Rank(beat, now, now)
        gone = {r for r, known in self._known.items() if known.beat.ended != DONE and self._is_gone(known.beat, alive)}
        if self._incident is not None:
            return self._follow(now, gone)
        found = self._dead(now, gone) or self._never_started(now) or self._hung(now)
        if found is None:
            return []
        self._incident = _Incident(found, now)
        for rank in {found.rank, *gone, *(found.suspects if found.kind == alarms.NEVER else ())}:
            self._incident.waits_for[rank] = self._identity(rank)
        return [found]

    def blame(self, alarm: Alarm) -> None:
        """Make this alarm the open incident: the stacks showed more than the beats."""
        assert self._incident is not None
        self._incident = _Incident(alarm, self._incident.began, {alarm.rank: self._identity(alarm.rank)})

    def _discount_own_sleep(self, now: float) -> None:
        """Do not count time in which the watchdog itself was suspended, as by a closed lid."""
        shortest = min((known.beat.every for known in self._known.values()), default=1.0)
        slept = now - self._looked
        self._looked = now
        if slept > shortest:
            self._began += slept
            for known in self._known.values():
                known.since, known.begun = known.since + slept, known.begun + slept

    def _is_gone(self, beat: Beat, alive: Alive) -> bool:
        return bool(beat.ended) or alive(beat) is False

    def _identity(self, rank: int) -> tuple:
        return self._known[rank].beat.identity if rank in self._known else ()

    def _dead(self, now: float, gone: set[int]) -> Alarm | None:
        if not gone:
            return None
        # the cause ended without a message, or by an error of its own; ranks that lost a peer ended because of it
        first = min(
            gone, key=lambda rank: (_lost_a_peer(self._known[rank].beat), self._known[rank].beat.position, rank)
        )
        known = self._known[first]
        return alarms.dead(known.beat, now - known.since, sorted(gone - {first}))

    def _never_started(self, now: float) -> Alarm | None:
        missing = [rank for rank in range(self.ranks) if rank not in self._known]
        if not missing or now - self._began < self._start_within:
            return None
        return alarms.never_started(missing, now - self._began, sorted(self._known))

    def _hung(self, now: float) -> Alarm | None:
        live = [known for known in self._known.values() if not known.beat.ended]
        if not live:
            return None
        last = min(known.beat.position for known in live)
        behind = [known for known in live if known.beat.position == last]
        culprit = None
        for known in live:
            if known in behind and not self._excused(known, live, now):
                culprit = culprit or (known if known.silence(now) >= known.limit else None)
            elif now - known.since >= known.limit:
                known.begun = now  # it waits for a rank that may be late: its limit starts after that
        if culprit is None:
            return None
        beats = [known.beat for _, known in sorted(self._known.items())]
        suspects = sorted(known.beat.rank for known in behind)
        return alarms.hung(culprit.beat, now - culprit.since, suspects, beats)

    def _excused(self, known: _Rank, live: list[_Rank], now: float) -> bool:
        return len(self._known) < self.ranks or any(
            other is not known
            and other.beat.may_take is not None
            and other.beat.step <= known.beat.step
            and other.silence(now) < other.limit
            for other in live
        )

    def _follow(self, now: float, gone: set[int]) -> list[Alarm | Recovery]:
        assert self._incident is not None
        incident, alarm = self._incident, self._incident.alarm
        for rank in gone:
            incident.waits_for.setdefault(rank, self._identity(rank))
        back = [r for r, was in incident.waits_for.items() if self._identity(r) != was and r not in gone]
        if len(back) < len(incident.waits_for):
            return []
        self._incident = None
        for known in self._known.values():  # ranks that waited during the incident start again
            known.begun = now
        return [alarms.recovery(alarm, self._known[alarm.rank].beat, now - incident.began)]


def _lost_a_peer(beat: Beat) -> bool:
    from course_lib.launch.rank import PEER_LOST

    return any(sign in beat.ended.lower() for sign in PEER_LOST)
