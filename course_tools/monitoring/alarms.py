"""The alarms of a watchdog: each says in one sentence which rank it is about, what happened to it, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from course_lib.launch.output import ranks_in_words
from course_lib.observe.heartbeat import DONE, NO_STEP, Beat

HUNG, DEAD, NEVER = "hung", "dead", "never started"


@dataclass(frozen=True)
class Alarm:
    """One incident.

    Attributes:
        rank: the rank that fell behind, not those that wait for it.
        kind: ``"hung"``, ``"dead"`` or ``"never started"``.
        step, phase: how far it got; ``None`` and ``""`` where it had not begun.
        since: seconds without a sign of life, by the watchdog's own clock.
        every: seconds between two of its beats; ``None`` if it had none.
        stack: its Python stack, (file, line, function), outermost call first; ``None`` if it could not be read.
        sentence: all of that in words.
        suspects: ranks that the beats alone could not tell apart; their stacks decide.
    """

    rank: int
    kind: str
    step: int | None
    phase: str
    since: float
    every: float | None
    stack: list[tuple[str, int, str]] | None
    sentence: str
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recovery:
    """The rank of an alarm beats again, ``seconds`` after the alarm."""

    rank: int
    kind: str
    seconds: float
    sentence: str


def hung(culprit: Beat, since: float, suspects: Sequence[int], beats: Sequence[Beat]) -> Alarm:
    """Report a rank that is silent for too long, and where the others (`beats`) got to."""
    limit = (
        f"it asked for {culprit.may_take:.4g} s" if culprit.may_take else f"its beats come every {culprit.every:.3g} s"
    )
    text = f"rank {culprit.rank} hangs at {culprit.place}: no sign of it for {since:.1f} s, {limit}."
    waiting: dict[str, list[int]] = {}
    for beat in beats:
        if beat.rank != culprit.rank and not beat.ended:
            waiting.setdefault(beat.place, []).append(beat.rank)
    for place, ranks in waiting.items():
        text += f" {_capital(ranks_in_words(ranks))} got to {place}."
    ended = [beat.rank for beat in beats if beat.ended == DONE]
    if ended:
        text += f" {_capital(ranks_in_words(ended))} {'has' if len(ended) == 1 else 'have'} ended already."
    return _alarm(HUNG, culprit, since, text, tuple(suspects))


def dead(culprit: Beat, since: float, others: Sequence[int]) -> Alarm:
    """Report a rank whose process is gone, and the `others` that ended because of it."""
    if culprit.ended:
        text = f"rank {culprit.rank} ended at {culprit.place} by {culprit.ended}"
    else:
        text = (
            f"rank {culprit.rank} is dead: its process {culprit.pid} is gone since {culprit.place}, without a word "
            "(most often SIGKILL: out of memory)"
        )
    if others:
        text += f"; {ranks_in_words(others)} went with it"
    return _alarm(DEAD, culprit, since, text + ".")


def never_started(missing: Sequence[int], since: float, started: Sequence[int]) -> Alarm:
    """Report ranks that never wrote a heartbeat."""
    text = f"{ranks_in_words(missing)} never started: no heartbeat within {since:.0f} s"
    text += (
        f"; {ranks_in_words(started)} {'is' if len(started) == 1 else 'are'} there."
        if started
        else "; nor did any other."
    )
    return Alarm(missing[0], NEVER, None, "", since, None, None, text, tuple(missing))


def recovery(alarm: Alarm, beat: Beat, seconds: float) -> Recovery:
    """Report that the rank of an alarm beats again."""
    return Recovery(
        alarm.rank, alarm.kind, seconds, f"rank {alarm.rank} goes on: {beat.place}, {seconds:.1f} s after the alarm."
    )


def with_stack(alarm: Alarm, stack: list[tuple[str, int, str]], where: str) -> Alarm:
    """Add the line that the alarm's rank is in."""
    return replace(
        alarm, stack=stack, sentence=f"{alarm.sentence} {_capital(ranks_in_words([alarm.rank]))} is in {where}."
    )


def _alarm(kind: str, beat: Beat, since: float, text: str, suspects: tuple[int, ...] = ()) -> Alarm:
    step = None if beat.step == NO_STEP else beat.step
    return Alarm(beat.rank, kind, step, beat.phase, since, beat.every, None, text, suspects or (beat.rank,))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
