"""Heartbeats of real ranks and a watchdog beside them: what hangs or dies is named, also in a chat."""

from __future__ import annotations

import io
import json
import os
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
from course_lib.models import tiny_llama
from course_lib.observe.heartbeat import Heartbeat, read_beats, trainer_callback
from course_tools.monitoring import Inbox, Watchdog, command, webhook


def quiet(_: str) -> None:
    pass


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name in ("watchdog", "webhook")]


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


def test_a_killed_rank_is_dead_with_its_last_beat_exact_and_the_one_it_takes_down_is_not_blamed(tmp_path):
    with Watchdog(tmp_path, ranks=2, tell=quiet) as watchdog:
        with pytest.raises(RankFailed):
            launch(steps_in_lockstep, str(tmp_path), steps=9, kill_at=5, ranks=2, timeout=120, quiet=True)
        alarm = watchdog.wait(60)
        time.sleep(0.3)
    assert (alarm.rank, alarm.kind, alarm.step, alarm.phase) == (1, "dead", 5, "data") and watchdog.alarms == [alarm]
    last = read_beats(tmp_path)[1]  # the beat just before SIGKILL, long before the next one was due
    assert (last.step, last.phase, last.turn, last.total, last.ended) == (5, "data", 1, 5 * 3 + 2, "")
    assert last.numbers == {"loss": 1 / 6}


def test_an_inbox_takes_what_is_posted_and_closes_its_port():
    with Inbox() as inbox:
        webhook.post(inbox.url, "rank 1 hangs")
    ((when, text),) = inbox.texts
    assert text == "rank 1 hangs" and when <= time.monotonic()
    with pytest.raises(OSError):
        webhook.post(inbox.url, "too late")


# ------------------------------------------------------------------------------------------------------- the heartbeat
def test_each_beat_is_in_the_file_a_declared_phase_too_and_the_stack_comes_on_demand(tmp_path):
    def beat():
        return read_beats(tmp_path)[3]

    with Heartbeat(tmp_path, rank=3, every=600, start_may_take=9) as heartbeat:
        assert (beat().step, beat().phase, beat().total, beat().may_take) == (-1, "start", 1, 9.0)
        for step in (10**9, 7, 8, 9):  # the record becomes shorter, and nothing of the longer one stays behind it
            heartbeat.beat(step, "a phase with a long name" if step > 99 else "data", loss=0.5 * step)
            assert (beat().step, beat().numbers) == (step, {"loss": 0.5 * step})
        with heartbeat.phase("saving", may_take=30):
            assert (beat().phase, beat().may_take, beat().turn, beat().pid) == ("saving", 30.0, 1, os.getpid())
        after = beat()
        assert (after.phase, after.may_take, after.step, after.total) == ("data", None, 9, 7)
        assert after.born == psutil.Process().create_time()
        os.kill(os.getpid(), signal.SIGUSR2)  # the watchdog's question
        until(lambda: "test_each_beat_is_in_the_file" in (tmp_path / "rank3.stack").read_text())
    heartbeat.beat(10, "data")  # what is done stays done
    assert (beat().ended, beat().step) == ("done", 9) and no_thread_is_left()


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (ValueError("nan in the loss"), "ValueError: nan in the loss"),
        (SystemExit(0), "done"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_how_the_block_is_left_is_the_last_word(tmp_path, error, ended):
    with pytest.raises(type(error)), Heartbeat(tmp_path, rank=0) as heartbeat:
        heartbeat.beat(4, "backward")
        with heartbeat.phase("saving", may_take=9):
            raise error
    assert (read_beats(tmp_path)[0].step, read_beats(tmp_path)[0].ended) == (4, ended)


def test_a_torn_file_is_left_out_until_it_is_whole_and_so_is_what_is_no_heartbeat(tmp_path):
    with Heartbeat(tmp_path, rank=0) as heartbeat, Heartbeat(tmp_path, rank=1):
        file = tmp_path / "rank0.json"
        before = file.read_bytes()
        heartbeat.beat()
        after = file.read_bytes()
        assert len(after) >= len(before) and read_beats(tmp_path)[0].total == 2
        middle = after.index(b'"host"')  # what both have in common lies around it
        mixed = (
            after[:middle] + before[middle:],
            before[:middle] + after[middle:],
            after.replace(b'"turn": 2', b'"turn": 1'),
        )
        for torn in (*mixed, after[:middle], b"", b"[1]", b"{}"):
            file.write_bytes(torn)
            assert sorted(read_beats(tmp_path)) == [1], torn
        (tmp_path / "rank-s.json").write_bytes(after)
        heartbeat.beat()
        assert read_beats(tmp_path)[0].total == 3 and sorted(read_beats(tmp_path)) == [0, 1]


def test_a_later_heartbeat_of_a_rank_is_not_disturbed_by_an_earlier_one(tmp_path):
    with Heartbeat(tmp_path, rank=0) as earlier, Heartbeat(tmp_path, rank=0) as later:
        later.beat(1, "data")
        earlier.beat(10**9, "a phase with a name so long that its record is the longer one")
        later.beat(2, "data")
        earlier.close()
        assert (read_beats(tmp_path)[0].step, read_beats(tmp_path)[0].ended) == (2, "")


def test_a_disk_that_fails_stops_nobody(tmp_path, capfd, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Heartbeat(tmp_path, rank=0) as heartbeat:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            heartbeat.beat(1, "data")
            heartbeat.beat(2, "data")
        printed = capfd.readouterr().err
        assert heartbeat.problem and printed.count("\n") == 1 and "rank 0" in printed
        assert read_beats(tmp_path)[0].step == -1
        heartbeat.beat(3, "data")
        assert not heartbeat.problem and read_beats(tmp_path)[0].step == 3
    assert read_beats(tmp_path)[0].ended == "done"


# -------------------------------------------------------------------------------------------- a Trainer of transformers
def test_a_trainer_beats_and_declares_what_takes_long(tmp_path):
    import transformers

    seen = []

    class Looking(transformers.Trainer):
        """Reads the file in the middle of a step, a save, and a batch of an evaluation."""

        def look(self, where):
            beat = read_beats(tmp_path / "beats")[0]
            seen.append((where, beat.step, beat.turn, beat.phase, beat.may_take))

        def training_step(self, *arguments, **named):
            self.look("step")
            return super().training_step(*arguments, **named)

        def save_model(self, *arguments, **named):
            self.look("save")
            return super().save_model(*arguments, **named)

        def prediction_step(self, *arguments, **named):
            self.look("batch")
            return super().prediction_step(*arguments, **named)

    rows = [{"input_ids": torch.arange(8) + row, "labels": torch.arange(8) + row} for row in range(24)]
    options = transformers.TrainingArguments(
        str(tmp_path / "out"),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=4,
        per_device_eval_batch_size=12,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    with Heartbeat(tmp_path / "beats", rank=0, every=5.0, start_may_take=60.0) as heartbeat:
        callbacks = [trainer_callback(heartbeat, may_take=600.0)]
        trainer = Looking(tiny_llama(layers=1), options, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
        trainer.train()
        last = read_beats(tmp_path / "beats")[0]
    first, later = 60.0, None  # the first steps may take longer
    expected = []
    for step in range(6):
        expected += [("step", step, turn, "step", first if step < 3 else later) for turn in (1, 2)]
        declared = {2: "saving", 3: "evaluating", 5: "evaluating and saving and ending"}.get(step, "")
        batches = 2 * ("evaluating" in declared)
        expected += [("batch", step, 3 + batch, declared, 600.0) for batch in range(batches)]
        expected += [("save", step, 3 + batches, declared, 600.0)] * ("saving" in declared)
    assert seen == expected
    assert (last.step, last.phase, read_beats(tmp_path / "beats")[0].ended) == (5, "ending", "done")


def test_files_of_an_earlier_run_are_no_news(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "Process", lambda: SimpleNamespace(pid=2**22 + 5, create_time=lambda: 1.0))
        Heartbeat(tmp_path, rank=0).beat(7, "data")
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
