"""The rule that turns silence into an alarm: which rank hangs, which one is dead, and which only waits.

It is handed the time, the beats and what is known of the processes, so a test can play hundreds of runs to it.

1. Each rank has a limit: 1.6 heartbeats of the length that it announces itself, or the seconds that it declared for a
   long phase. With ten looks per heartbeat, the alarm comes before two heartbeats have passed since its last beat.
   A heartbeat lasts at least 5 median steps (see heartbeat.py), so a healthy step may take over 7 times the median.
2. In lockstep, one hung rank silences all. Only the rank furthest behind is judged: the others wait for it. Where
   several are equally far, their stacks decide: the one that is not inside a collective is the cause.
3. A rank in a declared phase, within its seconds, excuses the ranks that wait for it; their limit starts again after it.
4. A rank whose process is gone before it said "done" is dead, at once. One that never wrote a beat has never started.
5. One alarm per incident: other ranks that fall silent or die meanwhile count as its consequences. The incident is over
   when its rank, and every rank that died meanwhile, beats again.
6. Silence is measured by the reader's clock, from when a file changed: clocks of two machines are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from course_lib.launch.output import ranks_in_words
from course_lib.launch.rank import PEER_LOST
from course_lib.observe.heartbeat import DONE, Beat
from course_tools.monitoring.stacks import Stack, waits, where

LIMIT = 1.6  # heartbeats of silence
LOOKS = 10.0  # looks per heartbeat
HUNG, DEAD, NEVER, RECOVERED = "hung", "dead", "never started", "recovered"


@dataclass(frozen=True)
class Event:
    """What happened to a rank."""

    rank: int  # the one that fell behind, not those that wait for it
    kind: str  # "hung", "dead", "never started"; "recovered" where the rank of an alarm beats again
    sentence: str  # which rank, what, since when and where
    beat: Beat | None = None  # its last one
    suspects: tuple[int, ...] = ()  # ranks that the beats alone do not tell apart


@dataclass
class _Rank:
    beat: Beat
    since: float  # when it came
    begun: float  # when its limit started: then, or later, after a rank that it waited for

    @property
    def limit(self) -> float:
        return LIMIT * self.beat.every if self.beat.may_take is None else self.beat.may_take


class Judge:
    """Judge the ranks of one run, look by look.

    Args:
        ranks: how many there should be.
        start_within: seconds until a rank that never wrote a beat is reported.
        stacks_of: returns the Python stacks of the ranks of these beats, of those that answer.
    """

    def __init__(
        self,
        ranks: int,
        *,
        start_within: float = 120.0,
        stacks_of: Callable[[list[Beat]], dict[int, Stack]] = lambda _: {},
    ) -> None:
        self.ranks, self._start_within, self._stacks_of = ranks, start_within, stacks_of
        self._looked: float | None = None
        self._clock = 0.0  # seconds since the first look
        self._known: dict[int, _Rank] = {}
        self._alarm: Event | None = None
        self._alarm_at = 0.0
        self._awaited: dict[int, tuple] = {}  # ranks that must beat again, and what they had said by the alarm

    @property
    def pace(self) -> float:
        """Seconds of the shortest heartbeat."""
        return min((known.beat.every for known in self._known.values()), default=1.0)

    @property
    def beats(self) -> list[Beat]:
        """The last beat of each rank."""
        return [known.beat for _, known in sorted(self._known.items())]

    @property
    def finished(self) -> bool:
        """True when every rank has said that it is done."""
        return len(self._known) == self.ranks and all(beat.ended == DONE for beat in self.beats)

    def look(self, now: float, beats: Mapping[int, Beat], gone: Collection[int] = ()) -> Event | None:
        """Return what is new: an alarm, a recovery, mostly nothing.

        Args:
            now: seconds of any clock that only goes forward.
            beats: of each rank, as its file has it now.
            gone: ranks whose process does not run any more.
        """
        passed = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if passed <= self.pace:  # else the watchdog itself was suspended, as by a closed lid
            self._clock += passed
        for rank, beat in beats.items():
            if 0 <= rank < self.ranks and self._identity(rank) != beat.identity:
                self._known[rank] = _Rank(beat, self._clock, self._clock)
        ended = {rank: known.beat.ended for rank, known in self._known.items()}
        fallen = {rank for rank, how in ended.items() if how != DONE and (how or rank in gone)}
        if self._alarm is not None:
            return self._recovered(fallen)
        self._alarm = self._dead(fallen) or self._never_started() or self._hung()
        if self._alarm is not None:
            self._alarm_at = self._clock
            missing = self._alarm.suspects if self._alarm.kind == NEVER else ()
            self._awaited = {rank: self._identity(rank) for rank in {self._alarm.rank, *fallen, *missing}}
        return self._alarm

    def _identity(self, rank: int) -> tuple:
        return self._known[rank].beat.identity if rank in self._known else ()

    def _dead(self, fallen: set[int]) -> Event | None:
        if not fallen:
            return None

        def blame(rank: int) -> tuple:
            # the cause ended without a message, or by an error of its own; ranks that lost a peer ended because of it
            beat = self._known[rank].beat
            return any(sign in beat.ended.lower() for sign in PEER_LOST), beat.position, rank

        first, *others = sorted(fallen, key=blame)
        beat = self._known[first].beat
        text = f"rank {first} ended at {beat.place} by {beat.ended}"
        if not beat.ended:
            text = (
                f"rank {first} is dead: its process {beat.pid} is gone since {beat.place}, without a word "
                "(most often SIGKILL: out of memory)"
            )
        return Event(first, DEAD, text + (f"; {ranks_in_words(others)} went with it." if others else "."), beat)

    def _never_started(self) -> Event | None:
        missing = tuple(rank for rank in range(self.ranks) if rank not in self._known)
        if not missing or self._clock < self._start_within:
            return None
        text = f"{ranks_in_words(missing)} never started: no heartbeat within {self._clock:.0f} s; "
        text += f"{ranks_in_words(self._known)} did." if self._known else "nor did any other."
        return Event(missing[0], NEVER, text, None, missing)

    def _hung(self) -> Event | None:
        running = [known for _, known in sorted(self._known.items()) if not known.beat.ended]
        last = min((known.beat.position for known in running), default=None)
        late = []
        for known in running:
            if known.beat.position == last and not self._is_excused(known, running):
                if self._clock - known.begun >= known.limit:
                    late.append(known)
            elif self._clock - known.since >= known.limit:
                known.begun = self._clock  # it waits for a rank that may be late: its limit starts after that
        if not late:
            return None
        suspects = [known for known in running if known.beat.position == last]
        stacks = self._stacks_of([known.beat for known in suspects])
        silent = [known for known in suspects if known.beat.rank not in stacks]
        busy = [known for known in suspects if known not in silent and not waits(stacks[known.beat.rank])]
        likely = busy or silent or late
        culprit = next((known for known in late if known in likely), likely[0])
        text = self._sentence(culprit, stacks.get(culprit.beat.rank))
        return Event(culprit.beat.rank, HUNG, text, culprit.beat, tuple(known.beat.rank for known in suspects))

    def _is_excused(self, rank: _Rank, running: Iterable[_Rank]) -> bool:
        """Return whether a rank that has not started yet, or is in a declared phase, may keep this one waiting."""
        return len(self._known) < self.ranks or any(
            other is not rank
            and other.beat.may_take is not None
            and other.beat.step <= rank.beat.step
            and self._clock - other.since < other.limit
            for other in running
        )

    def _sentence(self, culprit: _Rank, stack: Stack | None) -> str:
        beat = culprit.beat
        promised = f"its beats come every {beat.every:.3g} s"
        if beat.may_take is not None:
            promised = f"it asked for {beat.may_take:.4g} s"
        silence = self._clock - culprit.since
        text = f"rank {beat.rank} hangs at {beat.place}: no sign of it for {silence:.1f} s, {promised}."
        others: dict[str, list[int]] = {}
        for other in self.beats:
            if other.rank != beat.rank and other.ended in ("", DONE):
                others.setdefault("the end" if other.ended else other.place, []).append(other.rank)
        for place, ranks in others.items():
            text += f" {ranks_in_words(ranks).capitalize()} got to {place}."
        return text + (f" Rank {beat.rank} is in {where(stack)}." if stack else "")

    def _recovered(self, fallen: set[int]) -> Event | None:
        assert self._alarm is not None
        for rank in fallen:
            self._awaited.setdefault(rank, self._identity(rank))
        if any(rank in fallen or self._identity(rank) == said for rank, said in self._awaited.items()):
            return None
        rank, beat = self._alarm.rank, self._known[self._alarm.rank].beat
        self._alarm = None
        for known in self._known.values():  # ranks that waited during the incident start again
            known.begun = self._clock
        text = f"rank {rank} goes on: {beat.place}, {self._clock - self._alarm_at:.1f} s after the alarm."
        return Event(rank, RECOVERED, text, beat)
