"""The watchdog's rule, played hundreds of training runs in which time is a number: no sleep, no process, no file."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from course_lib.observe.heartbeat import Beat
from course_lib.observe.heartbeat.beats import DONE
from course_lib.observe.heartbeat.pace import Pace
from course_tools.monitoring import Alarm, Judge, Recovery
from course_tools.monitoring.judge import LOOKS

PHASES = ("data", "forward", "backward", "optimizer")
SHARES = (0.1, 0.3, 0.5, 0.1)
BARRIER = 2  # the gradients meet in the backward pass
HUNG = float("inf")


@dataclass
class Run:
    """What each rank's loop does and when: (time, step, phase, seconds declared or None), waits for others included."""

    said: list[list[tuple[float, int, str, float | None]]]
    hang: float = HUNG  # when the planted hang begins
    culprit: int = -1
    goes_on: bool = True
    end: float = 0.0
    alarms: list[Alarm] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    told_at: float = HUNG
    every: float = 0.0  # the heartbeat that the culprit promised


def trained(
    seed: int,
    *,
    ranks: int = 3,
    steps: int = 60,
    slow: float = 1.0,
    drift: float = 1.0,
    save: float = 0.0,
    savers: int = 0,
    hang: bool = False,
    pause: float = 0.0,
) -> Run:
    """A run in lockstep: one step ``slow`` times as long on one rank, steps that grow ``drift`` times as long, a save."""
    dice = random.Random(seed)
    run = Run([[] for _ in range(ranks)])
    clock = [0.0] * ranks
    victim, slow_step, slow_phase = dice.randrange(ranks), dice.randrange(10, steps - 10), dice.randrange(4)
    stop = (dice.randrange(10, steps - 10), dice.randrange(4)) if hang else None
    for step in range(steps):
        for number, phase in enumerate(PHASES):
            for rank in range(ranks):
                if clock[rank] == HUNG:
                    continue
                run.said[rank].append((clock[rank], step, phase, None))
                if stop == (step, number) and rank == victim:
                    run.hang, run.culprit = clock[rank] + dice.random() * 0.1 * SHARES[number], rank
                    clock[rank] = HUNG if not pause else run.hang + pause
                    continue
                seconds = SHARES[number] * dice.lognormvariate(0, 0.2) * drift ** (step / steps)
                if rank == victim and (step, number) == (slow_step, slow_phase):
                    seconds += (slow - 1) * drift ** (step / steps)
                clock[rank] += seconds
            if number == BARRIER:
                clock = [max(clock)] * ranks
        if save and step % 20 == 15:
            for rank in range(savers):
                run.said[rank].append((clock[rank], step, "saving", save * 1.2))
                clock[rank] += save
                run.said[rank].append((clock[rank], step, "saved", None))
    run.goes_on = stop is None or pause > 0
    run.end = max(said[-1][0] for said in run.said if said)
    return run


def play(run: Run, every: float) -> Run:
    """Have the rule watch a run: each rank's file is written as Heartbeat does, and read at every look."""
    ranks = len(run.said)
    paces = [Pace(every, 1000.0, 0.0) for _ in run.said]
    files = {rank: Beat(rank, every=every, may_take=1000.0) for rank in range(ranks)}
    written = [0.0] * ranks
    upto = [0] * ranks
    judge = Judge(ranks, 0.0)
    now, end = 0.0, run.end if run.goes_on else run.hang + 3 * max(every, 40.0)
    while now < end:
        now += min(file.every for file in files.values()) / LOOKS  # as Watchdog does
        for rank, pace in enumerate(paces):
            urgent = False
            while upto[rank] < len(run.said[rank]) and run.said[rank][upto[rank]][0] <= now:
                at, step, phase, declared = run.said[rank][upto[rank]]
                if declared is not None or pace.declared is not None:
                    pace.declare(at, phase, declared)
                    urgent = True
                else:
                    pace.beat(at, step, phase)
                upto[rank] += 1
            if pace.total != files[rank].total and (urgent or now >= written[rank] + pace.every):
                files[rank] = Beat(
                    rank, pace.step, pace.phase, pace.turn, pace.total, now - pace.at, pace.every, pace.may_take
                )
                written[rank] = pace.at
        for event in judge.look(now, files, lambda _: True):
            (run.alarms if isinstance(event, Alarm) else run.recoveries).append(event)
            if isinstance(event, Alarm) and run.told_at == HUNG:
                run.told_at, run.every = now, files[event.rank].every
    return run


@pytest.mark.parametrize("every", [0.5, 3.0, 25.0], ids="every={} steps".format)
@pytest.mark.parametrize(
    "kind",
    [
        {"slow": 6.0},
        {"slow": 6.0, "drift": 4.0},
        {"slow": 6.0, "save": 30.0, "savers": 1},
        {"slow": 6.0, "save": 30.0, "savers": 3},
        {"slow": 6.0, "ranks": 1},
    ],
    ids=["one slow step", "steps grow longer", "rank 0 saves", "all save", "one rank"],
)
def test_a_healthy_run_raises_no_alarm(kind, every):
    for seed in range(20):
        run = play(trained(seed, **kind), every)
        assert not run.alarms, f"seed {seed}: {run.alarms[0].sentence}"


@pytest.mark.parametrize("every", [0.5, 3.0, 25.0], ids="every={} steps".format)
@pytest.mark.parametrize("kind", [{}, {"drift": 4.0}, {"ranks": 2}, {"save": 30.0, "savers": 1}], ids=str)
def test_a_hang_is_reported_within_two_heartbeats_and_not_before_it_is_one(kind, every):
    worst = 0.0
    for seed in range(20):
        run = play(trained(seed, hang=True, **kind), every)
        assert [alarm.kind for alarm in run.alarms] == ["hung"], (seed, run.alarms)
        (alarm,) = run.alarms
        assert run.culprit in alarm.suspects, f"seed {seed}: rank {run.culprit} hangs; {alarm.sentence}"
        worst = max(worst, (run.told_at - run.hang) / run.every)
    assert 1.0 < worst <= 2.0, f"told {worst:.2f} heartbeats after the hang began"


def test_the_beats_alone_name_the_culprit_unless_all_are_in_the_same_phase():
    told = [(run.culprit, run.alarms[0]) for seed in range(40) for run in [play(trained(seed, hang=True), 3.0)]]
    sure = [(culprit, alarm) for culprit, alarm in told if alarm.phase != "backward"]
    assert len(sure) > 10 and all(alarm.suspects == (culprit,) == (alarm.rank,) for culprit, alarm in sure)


def test_one_alarm_and_one_recovery_for_a_rank_that_goes_on():
    run = play(trained(3, hang=True, pause=60.0), 3.0)
    assert [alarm.rank for alarm in run.alarms] == [run.culprit]
    (recovery,) = run.recoveries
    assert recovery.rank == run.culprit and 40 < recovery.seconds < 60 and "goes on" in recovery.sentence


def beat(rank: int, total: int = 1, **changes) -> Beat:
    return Beat(
        rank, **{"step": 4, "phase": "data", "turn": 1, "total": total, "pid": rank + 10, "every": 1.0} | changes
    )


def all_alive(_: Beat) -> bool:
    return True


def test_a_declared_phase_is_granted_its_seconds_and_no_more():
    judge = Judge(2, 0.0)
    saving = {0: beat(0, phase="saving", may_take=30.0), 1: beat(1, turn=2, phase="forward")}
    assert not [event for t in range(0, 290) for event in judge.look(t / 10, saving, all_alive)]
    told = [event for t in range(290, 320) for event in judge.look(t / 10, saving, all_alive)]
    assert [(one.rank, one.kind, one.phase) for one in told] == [(0, "hung", "saving")] and "asked for 30 s" in str(
        told
    )


def test_who_waits_is_not_blamed_though_it_fell_silent_first():
    judge = Judge(2, 0.0)
    beats, told = {0: beat(0, turn=3, phase="backward"), 1: beat(1)}, []
    for t in range(40):
        beats[1] = beat(1, 1 + (t >= 10))  # a second later than rank 0, and for the last time
        told += [(t, event.rank) for event in judge.look(t / 10, beats, all_alive)]
    assert [rank for _, rank in told] == [1] and 26 <= told[0][0] <= 28


def test_who_is_further_on_excuses_nobody():
    judge = Judge(2, 0.0)
    beats = {0: beat(0), 1: beat(1, step=10, phase="saving", may_take=30.0)}
    told = [event for t in range(30) for event in judge.look(t / 10, beats, all_alive)]
    assert [one.rank for one in told] == [0]


def test_a_machine_that_was_halted_is_held_against_nobody():
    judge, beats = Judge(1, 0.0), {0: beat(0)}
    assert not judge.look(0.1, beats, all_alive)
    told = [event for t in range(1000, 1030) for event in judge.look(t / 10, beats, all_alive)]
    assert [one.kind for one in told] == ["hung"] and told[0].since < 2


def test_the_dead_rank_is_named_and_those_that_follow_are_not():
    judge = Judge(3, 0.0)
    beats = {rank: beat(rank) for rank in range(3)}
    judge.look(0.1, beats, all_alive)
    (alarm,) = judge.look(0.2, beats, lambda one: one.rank != 2)
    assert (alarm.rank, alarm.kind, alarm.step) == (2, "dead", 4) and "SIGKILL" in alarm.sentence
    lost = beats | {0: beat(0, 2, ended="RuntimeError: Connection closed by peer")}
    assert not judge.look(0.3, lost, lambda one: one.rank == 1)
    # torchrun starts all of them again; nobody is well before all are back
    again = {rank: beat(rank, pid=rank + 20) for rank in range(3)}
    assert not judge.look(0.4, lost | {2: again[2]}, lambda one: one.pid >= 20)
    (recovery,) = judge.look(0.5, again, all_alive)
    assert recovery.rank == 2 and recovery.kind == "dead"
    done = {rank: beat(rank, 2, pid=rank + 20, ended=DONE) for rank in range(3)}
    assert not judge.look(0.6, done, lambda one: False) and judge.finished


def test_the_cause_is_the_error_that_is_no_lost_peer():
    judge = Judge(2, 0.0)
    beats = {0: beat(0, ended="RuntimeError: Connection closed by peer", step=3), 1: beat(1, ended="ValueError: bad")}
    (alarm,) = judge.look(0.1, beats, all_alive)
    assert alarm.rank == 1 and "ValueError: bad" in alarm.sentence and "rank 0 went with it" in alarm.sentence


def test_a_rank_that_never_started_is_missed_once():
    judge = Judge(3, 0.0, start_within=5.0)
    beats = {0: beat(0), 2: beat(2)}
    told = [event for t in range(1, 200) for event in judge.look(t / 10, beats, all_alive)]
    assert [(alarm.rank, alarm.kind, alarm.step) for alarm in told] == [(1, "never started", None)]
    assert "ranks 0, 2 are there" in told[0].sentence
    (recovery,) = judge.look(20.0, beats | {1: beat(1)}, all_alive)
    assert recovery.rank == 1


def test_what_cannot_be_known_from_here_is_judged_by_silence_alone():
    judge = Judge(1, 0.0)
    far = {0: beat(0, host="elsewhere", time=9e9, age=0.0)}  # its clock is years ahead
    told = [event for t in range(0, 30) for event in judge.look(t / 10, far, lambda _: None)]
    assert [alarm.kind for alarm in told] == ["hung"]


def test_the_last_ranks_are_told_from_the_one_that_left_early():
    judge = Judge(2, 0.0)
    told = [e for t in range(30) for e in judge.look(t / 10, {0: beat(0, ended=DONE), 1: beat(1)}, all_alive)]
    assert [alarm.rank for alarm in told] == [1] and "Rank 0 has ended already" in told[0].sentence
