"""Heartbeats of real ranks and a watchdog beside them: what hangs or dies is named, also in a chat."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace
from urllib.error import HTTPError

import psutil
import pytest
import torch
from processes import until
from refusals import assert_refused

from course_lib.launch import RankFailed, launch
from course_lib.observe.heartbeat import Heartbeat, read_beats
from course_lib.observe.heartbeat.beats import Beat, write_beat
from course_tools.monitoring import Watchdog, command, webhook


def quiet(_: str) -> None:
    pass


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name in ("watchdog", "webhook", "heartbeat")]


# ---------------------------------------------------------------------------------------------------------- real ranks
def steps_in_lockstep(folder: str, *, steps: int, hang_at: int = -1, kill_at: int = -1) -> None:
    """What a training loop does to a heartbeat; rank 1 hangs for a while, or is killed."""
    import torch.distributed as dist

    rank = dist.get_rank()
    with Heartbeat(folder, rank=rank, every=1.0, start_may_take=60) as heartbeat:
        for step in range(steps):
            heartbeat.beat(step, "data", loss=1.0 / (step + 1))
            if (rank, step) == (1, kill_at):
                os.kill(os.getpid(), signal.SIGKILL)
            # one slow step is no hang; and before it hangs, rank 1 is late, so that rank 0 falls silent first
            time.sleep(0.3 if rank == 1 and step in (10, hang_at) else 0)
            heartbeat.beat(phase="backward")
            if (rank, step) == (1, hang_at):
                time.sleep(4)  # the planted hang
            dist.all_reduce(torch.ones(8))
            heartbeat.beat(phase="optimizer")
            time.sleep(0.05)


def test_a_hung_rank_is_named_once_by_its_stack_and_reported_well_when_it_goes_on(tmp_path):
    """Both ranks fall silent in the same phase, rank 0 first: only their stacks tell that it waits for rank 1."""
    sentences = []
    with Watchdog(tmp_path, ranks=2, tell=sentences.append) as watchdog:
        launch(steps_in_lockstep, str(tmp_path), steps=35, hang_at=25, ranks=2, timeout=120, quiet=True)
        assert sorted(watchdog.ages()) == [0, 1]
        until(lambda: watchdog.finished)
    (alarm,), (recovery,) = watchdog.alarms, watchdog.recoveries
    assert (alarm.rank, alarm.kind, alarm.step, alarm.phase) == (1, "hung", 25, "backward")
    assert alarm.stack[-1][2] == "steps_in_lockstep" and "# the planted hang" in alarm.sentence
    assert recovery.rank == 1 and sentences == [alarm.sentence, recovery.sentence]
    assert (watchdog.beats[0].step, watchdog.beats[0].numbers) == (34, {"loss": 1 / 35})
    assert no_thread_is_left()


def test_a_killed_rank_is_dead_and_the_one_it_takes_down_is_not_blamed(tmp_path):
    with Watchdog(tmp_path, ranks=2, tell=quiet) as watchdog:
        with pytest.raises(RankFailed):
            launch(steps_in_lockstep, str(tmp_path), steps=9, kill_at=5, ranks=2, timeout=120, quiet=True)
        alarm = watchdog.wait(60)
        time.sleep(0.3)
    assert (alarm.rank, alarm.kind, alarm.step) == (1, "dead", 5) and watchdog.alarms == [alarm]


# ------------------------------------------------------------------------------------------------------- the heartbeat
def test_a_beat_writes_seldom_declares_at_once_and_tells_where_the_rank_is(tmp_path):
    with Heartbeat(tmp_path, rank=3, every=600, start_may_take=9) as heartbeat:
        for step in range(1000):
            heartbeat.beat(step, "data", loss=0.5)
        assert read_beats(tmp_path)[3].total == 1
        with heartbeat.phase("saving", may_take=30):
            until(lambda: read_beats(tmp_path)[3].phase == "saving")
            beat = read_beats(tmp_path)[3]
            assert (beat.may_take, beat.turn, beat.pid) == (30.0, 1, os.getpid())
        until(lambda: read_beats(tmp_path)[3].phase == "data")
        beat = read_beats(tmp_path)[3]
        assert (beat.may_take, beat.step, beat.born) == (None, 999, psutil.Process().create_time())
        os.kill(os.getpid(), signal.SIGUSR2)  # the watchdog's question
        until(lambda: "test_a_beat_writes_seldom" in (tmp_path / "rank3.stack").read_text())
    assert json.loads((tmp_path / "rank3.json").read_text())["ended"] == "done" and no_thread_is_left()


def test_a_disk_that_fails_stops_nobody(tmp_path, capfd):
    folder = tmp_path / "beats"
    with Heartbeat(folder, rank=0, every=0.02) as heartbeat:
        shutil.rmtree(folder)
        heartbeat.beat(1, "data")
        until(lambda: heartbeat.problem)
        assert "rank 0" in capfd.readouterr().err
        folder.mkdir()
        heartbeat.beat(3, "data")
        until(lambda: not heartbeat.problem)
    assert (read_beats(folder)[0].step, read_beats(folder)[0].ended) == (3, "done")


def test_files_of_an_earlier_run_are_no_news(tmp_path):
    write_beat(tmp_path, Beat(0, step=7, pid=2**22 + 5, host=os.uname().nodename))
    with Watchdog(tmp_path, ranks=1, tell=quiet, start_within=0.3) as watchdog:
        assert watchdog.wait(60).kind == "never started"
        with Heartbeat(tmp_path, rank=0, every=0.5):
            until(lambda: watchdog.recoveries)


# --------------------------------------------------------------------------------------------------------- the command
def test_the_command_watches_to_the_end_and_its_exit_code_says_whether_it_barked(tmp_path, monkeypatch, capsys):
    sentences = []
    monkeypatch.setattr(command, "_print_with_time", sentences.append)

    def rank_that_is_started_again():
        until(lambda: sentences)  # the watchdog watches
        try:
            with Heartbeat(tmp_path, rank=0, every=0.2) as heartbeat:
                heartbeat.beat(9, "data")
                raise ValueError("nan in the loss")
        except ValueError:
            until(lambda: len(sentences) == 2)
        with Heartbeat(tmp_path, rank=0, every=0.2):
            until(lambda: len(sentences) == 3)

    thread = threading.Thread(target=rank_that_is_started_again)
    thread.start()
    assert command.main([str(tmp_path), "--ranks", "1"]) == 1
    thread.join()
    _, alarm, recovery, _ = sentences
    assert "step 9, data" in alarm and "ValueError: nan in the loss" in alarm and "rank 0 goes on" in recovery

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(command, "_print_with_time", lambda _: os.kill(os.getpid(), signal.SIGINT))  # Ctrl-C
    assert command.main([str(tmp_path / "new"), "--ranks", "1"]) == 0 and signal.getsignal(signal.SIGINT) is handler
    for arguments, word in ((["--ranks", "0"], "ranks=0"), (["--ranks", "1", "--webhook", "slack.com/x"], "no URL")):
        assert command.main([str(tmp_path), *arguments]) == 2 and word in capsys.readouterr().err


def test_what_makes_no_sense_is_refused_before_anything_runs(tmp_path):
    urls = ("slack", "ftp://host/x", "http://", "https://ho st/", 7, "http://host:99999/")
    with Heartbeat(tmp_path, rank=0) as heartbeat:
        assert_refused(
            [
                (lambda: Heartbeat(tmp_path, rank=-1), ValueError, "rank=-1"),
                (lambda: Heartbeat(tmp_path, rank=0, every=float("nan")), ValueError, "every=nan"),
                (lambda: Heartbeat(tmp_path, rank=0, start_may_take="1"), ValueError, "start_may_take='1'"),
                (lambda: heartbeat.beat(1, "data", loss=torch.ones(())), TypeError, "loss"),
                (lambda: heartbeat.phase("saving", may_take=0).__enter__(), ValueError, "may_take=0"),
                (lambda: Watchdog(tmp_path, ranks=0), ValueError, "ranks=0"),
                (lambda: Watchdog(tmp_path, ranks=2, start_within=-1), ValueError, "start_within=-1"),
                *((lambda url=url: Watchdog(tmp_path, ranks=1, webhook=url), ValueError, "no URL") for url in urls),
            ]
        )
    assert no_thread_is_left()


# ------------------------------------------------------------------------------------------------------------ the chat
def http_error(code: int) -> HTTPError:
    return HTTPError("https://chat.example/SECRET", code, "no", {}, None)


def test_a_chat_is_told_and_one_that_fails_is_reported_without_its_secret(monkeypatch):
    bodies, answers, sentences = [], [], []

    def receive(request, timeout):
        bodies.append(json.loads(request.data))
        if answer := answers.pop(0):
            raise answer
        return io.BytesIO()

    monkeypatch.setattr(webhook.urllib.request, "build_opener", lambda *_: SimpleNamespace(open=receive))
    for planned, attempts, reason in (
        ([http_error(500), None], 2, ""),  # it arrives at the second attempt
        ([http_error(500)] * 3, 3, "500"),
        ([http_error(404)], 1, "404"),  # no use to try again
        ([TimeoutError("timed out")] * 3, 3, "timed out"),
    ):
        answers[:], bodies[:], sentences[:] = planned, [], []
        messenger = webhook.Messenger("https://chat.example/SECRET", sentences.append, back_off=0.01, timeout=60)
        messenger.send("rank 1 hangs")
        messenger.close()
        assert bodies == [{"text": "rank 1 hangs"}] * attempts, reason
        assert len(sentences) == bool(reason) and all(reason in said and "SECRET" not in said for said in sentences)
    answers[:] = [None]
    webhook.post("https://discord.com/api/webhooks/1", "rank 1 hangs")
    assert bodies[-1] == {"content": "rank 1 hangs"}  # Discord has its own key
    assert no_thread_is_left()
