"""Lab 7, exercise 7: the rule of a watchdog that neither sleeps through a hang nor cries wolf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness import NotYet, returned
from course_checks.lab07.beats import DONE, SAVING, WAITING, WORKING, Beat, Trace, made_up, recorded
from course_checks.lab07.common import lab

LOOKS = 5  # the watchdog looks so many times in one heartbeat
CLOCK = 1.7e9  # the watchdog's clock is the time of day


@lab.exercise("The watchdog's rule", importance=5, difficulty=3, minutes=30)
def watchdog_rule(hung: Callable[..., Any]) -> str:
    """Eleven made-up traces with one catch each and two recorded ones, looked at five times a heartbeat."""
    looks, found = 0, []
    for trace in [*made_up(), *recorded()]:
        looks += _watch(hung, trace)
        found += [trace] * bool(trace.culprits)
    real = recorded()
    return (
        f"{looks:,} looks at {len(made_up())} made-up traces and {len(real)} of real ranks: {len(found)} hangs, each reported "
        "within two heartbeats, with the ranks that hang and no other; no alarm for slow steps, late beats, saves and wrong clocks"
    )


def _watch(hung: Callable[..., Any], trace: Trace) -> int:
    """Let the rule look at a trace as time goes by."""
    looks = int(trace.until / trace.every * LOOKS)
    beats = [b._replace(received=b.received + CLOCK, sent=b.sent + CLOCK) for b in trace.beats]
    for look in range(1, looks + 1):
        now = look * trace.every / LOOKS
        known = [b for b in beats if b.received <= now + CLOCK]
        if not known:
            continue
        said = _ranks(hung(list(known), now + CLOCK, trace.every, trace.save_limit))
        must = {rank for rank, last in trace.culprits.items() if now - last > 2.0 * trace.every + 1e-3}
        may = {rank for rank, last in trace.culprits.items() if now - last > 1.8 * trace.every}
        if said - may:
            raise NotYet(_false_alarm(sorted(said - may), trace, now))
        if must - said:
            raise NotYet(_slept(sorted(must - said), trace, now))
    return looks


def _ranks(value: Any) -> set[int]:
    value = returned(
        value, (list, set, tuple, frozenset), "what hung() gives, the ranks that hang or [] while all is well,"
    )
    if any(not isinstance(rank, int) for rank in value):
        raise NotYet(
            f"hung() should return the ranks that hang, like [2], or [] while all is well, not {str(value)[:60]}"
        )
    return set(value)


def true_rule(beats: list[Beat], now: float, every: float, save_limit: float) -> set[int]:
    """The ranks that hang, by what each of them last said."""
    last: dict[int, Beat] = {}
    for beat in sorted(beats, key=lambda b: b.received):
        last[beat.rank] = beat
    limits = {WORKING: 2 * every, SAVING: save_limit}
    found = {r for r, b in last.items() if b.phase in limits and now - b.received > limits[b.phase]}
    there = [b for b in last.values() if b.phase != DONE]
    if there and all(b.phase == WAITING for b in there) and now - max(b.received for b in there) > 2 * every:
        found = {b.rank for b in there if b.step == min(b.step for b in there)}
    return found


def _last(trace: Trace, rank: int, now: float) -> Beat:
    return max((b for b in trace.beats if b.rank == rank and b.received <= now), key=lambda b: b.received)


def _false_alarm(ranks: list[int], trace: Trace, now: float) -> str:
    rank = ranks[0]
    last = _last(trace, rank, now)
    silent = (now - last.received) / trace.every
    told = f"{trace.shows}: at {now:.1f} s you report rank {rank}, whose last word was '{last.phase}', {silent:.1f} heartbeats ago"
    if last.phase == DONE:
        return f"{told}: it has nothing more to say"
    if abs(last.sent - last.received) > 5 * trace.every:
        return f"{told}: its clock is wrong by {last.sent - last.received:.0f} s. Measure by the watchdog's own clock, `received`"
    if last.phase == SAVING:
        return f"{told}: a save is silent, and may take save_limit = {trace.save_limit:g} s"
    if last.phase == WAITING:
        if trace.culprits:
            others = ", ".join(map(str, sorted(trace.culprits)))
            return f"{told}: it waits for rank {others}, and whoever waits for another is not to blame"
        return (
            f"{told}: it waits for others that are at work; who is in a collective is silent, however long that takes"
        )
    if silent <= 0.9:
        return f"{told}: it beats as it should; in a slow step the number of the step stands still for long"
    return f"{told}: a beat that comes late is no hang; two whole heartbeats have to pass without one"


def _slept(ranks: list[int], trace: Trace, now: float) -> str:
    rank = ranks[0]
    last = _last(trace, rank, now)
    silent = (now - last.received) / trace.every
    told = f"{trace.shows}: at {now:.1f} s rank {rank} has been silent for {silent:.1f} heartbeats ('{last.phase}' was its last word), and you report "
    told += "nothing" if len(ranks) == len(trace.culprits) else "another rank alone"
    if last.phase == SAVING:
        return f"{told}: a save may take {trace.save_limit:g} s and not for ever"
    if last.phase == WAITING:
        return (
            f"{told}: when every rank waits, and the last of them for more than two heartbeats, nobody is left who could come. "
            "Name those that wait in the lowest step"
        )
    if last.sent > last.received + 5 * trace.every:
        return f"{told}: its clock is ahead. Measure by the watchdog's own clock, `received`"
    return f"{told}: two heartbeats without a word are enough. Of each rank take the last beat; another rank's do not excuse it"
