"""The watchdog's rule, played training runs in which time is a number: no sleep, no process, no file."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from course_lib.observe.heartbeat import DONE, Beat, Pace
from course_tools.monitoring import Event, Judge
from course_tools.monitoring.judge import LOOKS

PHASES = {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}  # and their shares of a step of one second
NEVER = float("inf")


@dataclass
class Run:
    """What each rank's loop does and when: (time, step, phase), waits for others included."""

    ranks: list[list[tuple[float, int, str]]]
    hang: float = NEVER  # when the planted hang begins
    culprit: int = -1
    alarms: list[Event] = field(default_factory=list)
    delay: float = NEVER  # from the hang to the alarm, in the heartbeats that the culprit promised


def trained(seed: int, *, ranks: int = 3, slow: float = 1.0, drift: float = 1.0, hang: bool = False) -> Run:
    """60 steps in lockstep: one ``slow`` times as long on one rank, all growing by ``drift``; or one hangs for ever."""
    dice, steps = random.Random(seed), 60
    run, clock = Run([[] for _ in range(ranks)]), [0.0] * ranks
    victim, planted = dice.randrange(ranks), (dice.randrange(10, steps - 10), dice.choice(list(PHASES)))
    for step in range(steps):
        for phase, share in PHASES.items():
            for rank in range(ranks):
                if clock[rank] == NEVER:
                    continue
                run.ranks[rank].append((clock[rank], step, phase))
                growth = drift ** (step / steps)
                seconds = share * dice.lognormvariate(0, 0.2) * growth
                if (rank, step, phase) == (victim, *planted):
                    seconds += NEVER if hang else (slow - 1) * growth
                    run.hang, run.culprit = (clock[rank], rank) if hang else (NEVER, -1)
                clock[rank] += seconds
            if phase == "backward":  # the gradients meet
                clock = [max(clock)] * ranks
    return run


def play(run: Run, every: float) -> Run:
    """Have the rule watch a run: each beat is in the rank's file at once, and the files are read at every look."""
    paces = [Pace(every, 1000.0, 0.0) for _ in run.ranks]
    files = {rank: Beat(rank, every=every, may_take=1000.0) for rank in range(len(paces))}
    to_come = [list(beats) for beats in run.ranks]
    judge, now = Judge(len(paces)), 0.0
    end = run.ranks[0][-1][0] if run.hang == NEVER else run.hang + 60.0
    while now < end and not run.alarms:
        now += min(file.every for file in files.values()) / LOOKS  # as Watchdog does
        for rank, pace in enumerate(paces):
            while to_come[rank] and to_come[rank][0][0] <= now:
                at, step, phase = to_come[rank].pop(0)
                pace.beat(at, step, phase)
                place = pace.step, pace.phase, pace.turn, pace.total
                files[rank] = Beat(rank, *place, every=pace.every, may_take=pace.may_take)
        run.alarms += filter(None, [judge.look(now, files)])
    if run.alarms:
        run.delay = (now - run.hang) / files[run.alarms[0].rank].every
    return run


EVERY = (0.5, 3.0, 25.0)  # seconds between two beats, where a step takes one


def test_a_healthy_run_raises_no_alarm():
    for kind, every, seed in itertools.product(({}, {"drift": 4.0}, {"ranks": 1}), EVERY, range(20)):
        run = play(trained(seed, slow=6.0, **kind), every)
        assert not run.alarms, f"{kind}, every {every} s, seed {seed}: {run.alarms[0].sentence}"


def test_a_hang_is_reported_within_two_heartbeats_and_the_culprit_is_among_the_suspects():
    certain = 0
    for kind, every in itertools.product(({}, {"drift": 4.0}, {"ranks": 2}), EVERY):
        runs = [play(trained(seed, hang=True, **kind), every) for seed in range(10)]
        for seed, run in enumerate(runs):
            case = f"{kind}, every {every} s, seed {seed}: rank {run.culprit} hangs, {run.alarms}"
            assert [alarm.kind for alarm in run.alarms] == ["hung"], case
            assert run.culprit in run.alarms[0].suspects, case
            if run.alarms[0].beat.phase != "backward":  # there all are in the same phase, and their stacks decide
                assert run.alarms[0].suspects == (run.culprit,) == (run.alarms[0].rank,), case
                certain += 1
        assert 1.0 < max(run.delay for run in runs) <= 2.0, f"{kind}, every {every} s"
    assert certain > 10


def beat(rank: int, total: int = 1, **changes) -> Beat:
    usual = {"step": 4, "phase": "data", "turn": 1, "pid": rank + 10, "every": 1.0}
    return Beat(rank, total=total, **usual | changes)


def test_who_is_to_blame():
    """Each row: the ranks' beats at second t, whom the judge must name, for what, and when."""
    lost_a_peer = beat(0, ended="RuntimeError: Connection closed by peer", step=3)
    rows = {
        "a declared phase gets its seconds and no more": (
            lambda t: {0: beat(0, phase="saving", may_take=30.0), 1: beat(1, turn=2, phase="forward")},
            *((0, "hung"), (29, 32)),
        ),
        "who waits is not blamed though it fell silent first": (
            lambda t: {0: beat(0, turn=3, phase="backward"), 1: beat(1, 1 + (t >= 1))},
            *((1, "hung"), (2.6, 2.8)),
        ),
        "who is further on excuses nobody": (
            lambda t: {0: beat(0), 1: beat(1, step=10, phase="saving", may_take=30.0)},
            *((0, "hung"), (1.6, 2)),
        ),
        "who waited for a declared phase gets its limit again": (
            lambda t: {0: beat(0, turn=2), 1: beat(1, may_take=30.0) if t < 10 else beat(1, 2, turn=3)},
            *((0, "hung"), (11, 12)),
        ),
        "two that declare the same phase excuse each other once": (
            lambda t: {0: beat(0, may_take=10.0)} | ({1: beat(1, may_take=10.0)} if t >= 4 else {}),
            *((1, "hung"), (14, 14.2)),
        ),
        "a clock that is years ahead": (
            lambda t: {0: beat(0, host="elsewhere", born=9e9), 1: beat(1, int(10 * t))},
            *((0, "hung"), (1.6, 2)),
        ),
        "the cause is the error that is no lost peer": (
            lambda t: {0: lost_a_peer, 1: beat(1, ended="ValueError: bad")},
            *((1, "dead"), (0, 0.2)),
        ),
        "a rank that never started": (lambda t: {0: beat(0, int(10 * t))}, *((1, "never started"), (5, 5.2))),
    }
    for name, (beats, expected, (earliest, latest)) in rows.items():
        judge = Judge(2, start_within=5.0)
        looks = [(t / 10, judge.look(t / 10, beats(t / 10))) for t in range(400)]
        events = [(t, event) for t, event in looks if event]
        assert [(event.rank, event.kind) for _, event in events] == [expected], name
        assert earliest <= events[0][0] <= latest, (name, events)


def test_of_ranks_that_are_equally_far_the_stacks_tell_which_one_waits():
    library = "/".join(["", "lib", "site-packages", "torch", "distributed", "distributed_c10d.py"])
    waiting = [(library, 7, "all_reduce")]
    busy = [("/home/me/train.py", 14, "load")]
    rows = [
        ({0: waiting, 1: waiting, 2: busy}, 2),
        ({0: waiting, 1: waiting + busy, 2: waiting}, 1),  # in a hook of a backward pass, say
        ({0: waiting, 1: waiting}, 2),  # which does not answer
        ({1: busy}, 1),
        ({0: waiting, 1: waiting, 2: waiting}, 0),
        ({}, 0),
    ]
    for stacks, culprit in rows:
        judge = Judge(3, stacks_of=lambda beats, stacks=stacks: stacks)
        (alarm,) = filter(None, (judge.look(t / 10, {rank: beat(rank) for rank in range(3)}) for t in range(30)))
        assert (alarm.rank, alarm.suspects) == (culprit, (0, 1, 2)), stacks
        assert ("train.py, line 14" in alarm.sentence) == (busy[0] in stacks.get(culprit, [])), alarm.sentence


def test_a_machine_that_was_halted_is_held_against_nobody():
    judge, beats = Judge(1), {0: beat(0)}
    assert not judge.look(0.0, beats) and not judge.look(0.1, beats)
    looks = [(t / 10, event) for t in range(1000, 1030) if (event := judge.look(t / 10, beats))]
    assert [event.kind for _, event in looks] == ["hung"] and 101 < looks[0][0] < 102


def test_the_dead_rank_is_named_and_those_that_follow_are_not():
    judge, beats = Judge(3), {rank: beat(rank) for rank in range(3)}
    judge.look(0.1, beats)
    alarm = judge.look(0.2, beats, gone=[2])
    assert (alarm.rank, alarm.kind, alarm.beat) == (2, "dead", beats[2])
    lost = beats | {0: beat(0, 2, ended="RuntimeError: Connection closed by peer")}
    assert not judge.look(0.3, lost, gone=[0, 2])
    # torchrun starts all of them again; nobody is well before all are back
    again = {rank: beat(rank, pid=rank + 20) for rank in range(3)}
    assert not judge.look(0.4, lost | {2: again[2]}, gone=[0])
    recovery = judge.look(0.5, again)
    assert (recovery.rank, recovery.kind) == (2, "recovered")
    done = {rank: beat(rank, 2, pid=rank + 20, ended=DONE) for rank in range(3)}
    assert not judge.look(0.6, done, gone=[0, 1, 2]) and judge.finished
