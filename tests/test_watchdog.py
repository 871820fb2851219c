"""Heartbeats in real processes, a watchdog beside them: what hangs or dies is named, what only waits is not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from course_lib.launch import RankFailed, launch
from course_lib.observe.heartbeat import Heartbeat, read_beats
from course_lib.observe.heartbeat.beats import Beat, write_beat
from course_tools.monitoring import Watchdog
from course_tools.monitoring.command import main

EVERY = 1.0


def within(seconds: float, true: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(true())


def steps_in_lockstep(folder: str, *, steps: int, plant: dict[int, tuple[str, float]]) -> list[float]:
    """What a training loop does to a heartbeat; ``plant``: step -> what happens on rank 1 before its forward pass."""
    import os
    import signal
    import time

    import torch
    import torch.distributed as dist

    from course_lib.observe.heartbeat import Heartbeat

    rank, planted_at = dist.get_rank(), []
    with Heartbeat(folder, rank=rank, every=1.0, start_may_take=60) as heartbeat:
        for step in range(steps):
            heartbeat.beat(step, "data", loss=1.0 / (step + 1))
            what, seconds = plant.get(step, ("", 0.0)) if rank == 1 else ("", 0.0)
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            planted_at += [time.time()] if what else []
            time.sleep(seconds)  # the planted hang
            heartbeat.beat(phase="backward")
            dist.all_reduce(torch.ones(8))
            heartbeat.beat(phase="optimizer")
            time.sleep(0.05)
    return planted_at


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """One real run: a slow step of 6 times the others, later a hang of 3.2 s, from which rank 1 goes on."""
    folder = tmp_path_factory.mktemp("beats")
    told, rang = [], []

    def ring(sentence):
        rang.append(time.time())
        told.append(sentence)

    with Watchdog(folder, ranks=2, tell=ring) as watchdog:
        plant = {10: ("slow", 0.3), 25: ("hang", 3.2)}
        run = launch(steps_in_lockstep, str(folder), steps=35, plant=plant, ranks=2, timeout=60, quiet=True)
        ages = watchdog.ages()
        within(60, lambda: watchdog.finished)
    return watchdog, told, rang, run.results[1], ages


def test_a_hung_rank_is_named_once_with_its_place_and_line(watched):
    watchdog, told, rang, (_, hung_at), ages = watched
    (alarm,) = watchdog.alarms
    assert (alarm.rank, alarm.kind, alarm.step, alarm.phase) == (1, "hung", 25, "data")
    assert rang[0] - hung_at > EVERY  # how soon it is told, `benchmarks/watchdog.py` measures
    assert "time.sleep(seconds)  # the planted hang" in told[0] and "Rank 0 got to step 25, backward" in told[0]
    assert alarm.stack[-1][2] == "steps_in_lockstep" and sorted(ages) == [0, 1]


def test_the_rank_that_goes_on_is_reported_and_the_run_ends_well(watched):
    watchdog, told, *_ = watched
    (recovery,) = watchdog.recoveries
    assert recovery.rank == 1 and recovery.sentence == told[1] and len(told) == 2
    assert watchdog.finished and watchdog.beats[0].step == 34 and watchdog.beats[0].numbers == {"loss": 1 / 35}
    assert not [thread for thread in threading.enumerate() if thread.name in ("watchdog", "webhook")]


def test_a_killed_rank_is_dead_at_once_and_the_one_it_takes_down_is_not_blamed(tmp_path):
    with Watchdog(tmp_path, ranks=2, tell=lambda _: None) as watchdog:
        with pytest.raises(RankFailed):
            plant = {5: ("kill", 0.0)}
            launch(steps_in_lockstep, str(tmp_path), steps=9, plant=plant, ranks=2, timeout=60, quiet=True)
        alarm = watchdog.wait(60)
        time.sleep(0.3)
    assert (alarm.rank, alarm.kind, alarm.step) == (1, "dead", 5) and watchdog.alarms == [alarm]


LOOP = """
import sys, time
from course_lib.observe.heartbeat import Heartbeat
with Heartbeat(sys.argv[1], rank=int(sys.argv[2]), every=0.2) as heartbeat:
    for step in range(10):
        heartbeat.beat(step, "data")
        time.sleep(0.02)
    {end}
"""


def child(folder, rank: int, end: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", LOOP.format(end=end), str(folder), str(rank)], stderr=subprocess.DEVNULL
    )


def test_the_stack_tells_who_does_not_wait_where_the_beats_cannot(tmp_path):
    """Rank 0 sits in what looks like torch.distributed; rank 1 in a sleep, though a launcher of PyTorch's called it."""
    package = tmp_path / "site-packages" / "torch" / "distributed"  # elsewhere it would be a program of the learner's
    (package / "elastic").mkdir(parents=True)
    (package / "stub.py").write_text("import time\ndef wait():\n    time.sleep(60)\n")
    (package / "elastic" / "outer.py").write_text("def call(function):\n    function()\n")
    (tmp_path / "mine.py").write_text("import time\ndef stuck():\n    time.sleep(60)  # here\n")
    ready = (
        f"sys.path[:0] = {[str(package), str(package / 'elastic'), str(tmp_path)]!r}; import stub, outer, mine; "
        "heartbeat.beat(10, 'backward');"  # after the imports: on a busy machine one takes longer than a heartbeat
    )
    ranks = [
        child(tmp_path / "b", 0, f"{ready} stub.wait()"),
        child(tmp_path / "b", 1, f"{ready} outer.call(mine.stuck)"),
    ]
    try:
        with Watchdog(tmp_path / "b", ranks=2, tell=lambda _: None) as watchdog:
            alarm = watchdog.wait(60)
            assert (alarm.rank, alarm.suspects) == (1, (0, 1)) and "mine.py, line 3: `time.sleep(60)  # here`" in str(
                alarm
            )
            ranks[1].kill()  # the same incident
            time.sleep(0.3)
        assert len(watchdog.alarms) == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_the_command_watches_to_the_end_and_its_exit_code_says_whether_it_barked(tmp_path, capsys):
    command = [sys.executable, "-m", "course_tools", "watch", str(tmp_path), "--ranks", "2"]
    watching, ranks = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), []
    try:
        said = watching.stdout.readline()
        assert "watching 2 ranks" in said
        ranks = [child(tmp_path, 0, "pass"), child(tmp_path, 1, "raise ValueError('nan in the loss')")]
        while "ValueError: nan in the loss" not in said:
            said += watching.stdout.readline()
        assert "rank 1 ended at step 9, data by ValueError" in said
        assert [rank.wait(120) for rank in ranks] == [0, 1]
        second = child(tmp_path, 1, "pass")  # as torchrun would start it again
        assert second.wait(120) == 0
        said += watching.communicate(timeout=120)[0]
        assert "rank 1 goes on" in said and "every rank is done." in said and watching.returncode == 1
    finally:
        watching.kill()
        watching.wait()
    mine = signal.getsignal(signal.SIGINT)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert main([str(tmp_path), "--ranks", "2"]) == 0 and signal.getsignal(signal.SIGINT) is mine
    capsys.readouterr()
    assert main([str(tmp_path), "--ranks", "0"]) == 2 and "1 or more" in capsys.readouterr().err
    assert main([str(tmp_path), "--ranks", "1", "--webhook", "hooks.slack.com/x"]) == 2
    assert "no URL" in capsys.readouterr().err


def test_files_of_an_earlier_run_are_no_news(tmp_path):
    write_beat(tmp_path, Beat(0, step=7, pid=2**22 + 5, host=os.uname().nodename))
    with Watchdog(tmp_path, ranks=1, tell=lambda _: None, start_within=0.3) as watchdog:
        alarm = watchdog.wait(60)
        assert alarm.kind == "never started"
        with Heartbeat(tmp_path, rank=0, every=0.5):
            assert within(60, lambda: watchdog.recoveries)
    assert [recovery.rank for recovery in watchdog.recoveries] == [0]


def test_a_disk_that_fails_and_a_reader_that_is_closed_stop_nobody(tmp_path, capfd):
    folder = tmp_path / "beats"
    with Heartbeat(folder, rank=0, every=0.02) as heartbeat:
        shutil.rmtree(folder)
        for step in range(3):
            heartbeat.beat(step, "data")
            time.sleep(0.05)
        assert within(60, lambda: heartbeat.problem) and "training goes on" in capfd.readouterr().err
        folder.mkdir()
        heartbeat.beat(3, "data")
        assert within(60, lambda: not heartbeat.problem)
    (beat,) = read_beats(folder).values()
    assert beat.step == 3 and beat.ended == "done"

    def closed(_):
        raise BrokenPipeError("closed")

    with Watchdog(tmp_path / "none", ranks=1, tell=closed, start_within=0.1) as watchdog:
        assert watchdog.wait(60).kind == "never started" and within(60, lambda: "BrokenPipeError" in watchdog.problem)
        assert watchdog._thread.is_alive()


def test_the_beat_writes_seldom_and_declares_at_once(tmp_path):
    with Heartbeat(tmp_path, rank=3, every=0.5, start_may_take=9) as heartbeat:
        began, seen = time.monotonic(), set()
        for step in range(1000):
            heartbeat.beat(step, "data", loss=0.5)
            if step % 50 == 0:
                seen.add(read_beats(tmp_path)[3].total)
        assert len(seen) <= 2 + (time.monotonic() - began) / 0.4
        with heartbeat.phase("saving", may_take=30):
            within(60, lambda: read_beats(tmp_path)[3].phase == "saving")
            beat = read_beats(tmp_path)[3]
            assert (beat.phase, beat.may_take, beat.turn, beat.pid) == ("saving", 30.0, 1, os.getpid())
        within(60, lambda: read_beats(tmp_path)[3].phase == "data")
        beat = read_beats(tmp_path)[3]
        assert (beat.phase, beat.may_take, beat.step) == ("data", None, 999)
        assert beat.born == psutil.Process().create_time()
        os.kill(os.getpid(), signal.SIGUSR2)  # the watchdog's question
        assert within(60, lambda: "test_the_beat_writes_seldom" in (tmp_path / "rank3.stack").read_text())
    assert json.loads((tmp_path / "rank3.json").read_text())["ended"] == "done"
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    with pytest.raises(KeyError), Heartbeat(tmp_path, rank=3):
        raise KeyError("lost")
    assert read_beats(tmp_path)[3].ended == "KeyError: 'lost'"


@pytest.mark.parametrize(
    "wrong", [{"rank": -1}, {"rank": True}, {"every": 0}, {"every": float("nan")}, {"start_may_take": "1"}]
)
def test_a_heartbeat_that_makes_no_sense_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="give"):
        Heartbeat(tmp_path, **{"rank": 0} | wrong)


def test_what_a_beat_may_carry(tmp_path):
    import torch

    with Heartbeat(tmp_path, rank=0) as heartbeat:
        with pytest.raises(TypeError, match="Python number"):
            heartbeat.beat(1, "data", loss=torch.ones(()))
        with pytest.raises(ValueError, match="may_take"), heartbeat.phase("saving", may_take=0):
            pass
        heartbeat.beat(1, "data", loss=float("nan"))
    assert read_beats(tmp_path)[0].numbers == {"loss": "nan"}


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"ranks": 2, "start_within": -1}, {"ranks": 2, "webhook": "slack"}])
def test_a_watchdog_that_makes_no_sense_is_refused_before_it_watches(tmp_path, wrong):
    with pytest.raises(ValueError):
        Watchdog(tmp_path, **wrong)
