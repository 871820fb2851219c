"""Heartbeats, and a watchdog beside real ranks: one that hangs and one that is killed are named, also in a chat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.error import HTTPError

import psutil
import pytest
import torch
from processes import ROOT, until
from refusals import assert_refused

from course_lib.launch import RankFailed, launch
from course_lib.models import tiny_llama
from course_lib.observe.heartbeat import Heartbeat, read_beats, trainer_callback
from course_tools.monitoring import Inbox, Watchdog, command, webhook
from course_tools.monitoring.stacks import stacks_of, waits


# ---------------------------------------------------------------------------------------------------------- real ranks
def trains_until_rank_1(hangs_or_dies: str, folder: str) -> None:
    """What a training loop does to a heartbeat; in step 1 rank 1 hangs before its all-reduce, or is killed."""
    import torch.distributed as dist

    rank, every = dist.get_rank(), 1.0 if hangs_or_dies == "hangs" else 600.0  # that one has a real clock beside it
    with Heartbeat(folder, rank=rank, every=every, start_may_take=every) as heartbeat:
        for step in range(3):
            heartbeat.beat(step, "backward", loss=1.0 / (step + 1))
            if (rank, step, hangs_or_dies) == (1, 1, "hangs"):
                open(f"{folder}/pipe").read()  # until somebody has written there
            if (rank, step, hangs_or_dies) == (1, 1, "dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(8))


def test_a_rank_that_hangs_while_the_other_waits_for_it_is_named_by_its_stack(tmp_path):
    """Both are in the same phase of the same step: only their stacks tell that rank 0 waits. The test has the clock."""
    sentences = []
    watchdog = Watchdog(tmp_path, ranks=2, tell=sentences.append)
    os.mkfifo(tmp_path / "pipe")

    def watch():
        until(lambda: [beat.step for beat in read_beats(tmp_path).values()] == [1, 1])
        until(lambda: waits(stacks_of([read_beats(tmp_path)[0]], tmp_path, 10.0).get(0, [])))
        for tick in range(20):
            watchdog.look(tick / 4)
        (tmp_path / "pipe").write_text("go on")
        until(lambda: watchdog.look(20 / 4) or watchdog.finished)

    with ThreadPoolExecutor(1) as pool:
        watched = pool.submit(watch)
        launch(trains_until_rank_1, "hangs", str(tmp_path), ranks=2, timeout=120, quiet=True)
        watched.result()
    (alarm,), (recovery,) = watchdog.alarms, watchdog.recoveries
    assert (alarm.rank, alarm.kind, alarm.beat.step, alarm.suspects) == (1, "hung", 1, (0, 1))
    assert "/pipe" in alarm.sentence  # the line that rank 1 is in
    assert (recovery.rank, recovery.kind) == (1, "recovered") and sentences == [alarm.sentence, recovery.sentence]


def test_the_command_names_the_killed_rank_and_not_the_one_that_it_takes_down(tmp_path):
    words = [sys.executable, "-m", "course_tools", "watch", str(tmp_path), "--ranks", "2"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watch:
        assert str(tmp_path) in watch.stdout.readline()  # it watches
        with pytest.raises(RankFailed):
            launch(trains_until_rank_1, "dies", str(tmp_path), ranks=2, timeout=120, quiet=True)
        alarm = watch.stdout.readline()
        last = read_beats(tmp_path)[1]  # the beat just before SIGKILL
        for rank in range(2):  # both are started again, and end as they should
            Heartbeat(tmp_path, rank=rank).close()
        recovery, end = watch.stdout.read().splitlines()
    assert "rank 1" in alarm and f"process {last.pid}" in alarm and "rank 1" in recovery
    assert (last.step, last.phase, last.total, last.ended, last.numbers) == (1, "backward", 3, "", {"loss": 1 / 2})
    assert watch.returncode == 1


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
    assert (beat().ended, beat().step) == ("done", 9)


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


# ------------------------------------------------------------------------------------------- the watchdog and a chat
def test_files_of_an_earlier_run_are_no_news_and_a_chat_is_told(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "Process", lambda: SimpleNamespace(pid=os.getpid(), create_time=lambda: 1.0))
        Heartbeat(tmp_path, rank=0).beat(7, "data")  # of a process that had this one's number
    at_once = webhook.post

    def post(*message):
        until(lambda: watchdog.recoveries)  # a slow chat: it holds nothing up, and gets all in the end
        at_once(*message)

    monkeypatch.setattr(webhook, "post", post)
    with Inbox() as inbox:
        watchdog = Watchdog(tmp_path, ranks=1, tell=lambda _: 1 / 0, start_within=1.5, webhook=inbox.url)
        for second in range(3):
            watchdog.look(float(second))
        with watchdog, Heartbeat(tmp_path, rank=0):
            until(lambda: watchdog.recoveries)
    assert [alarm.kind for alarm in watchdog.alarms] == ["never started"]
    assert [text for _, text in inbox.texts] == [watchdog.alarms[0].sentence, watchdog.recoveries[0].sentence]


def test_a_chat_that_fails_gets_a_second_try_and_is_reported_without_its_secret(monkeypatch):
    refused, url = HTTPError("https://chat.example/SECRET", 500, "no", {}, None), "https://chat.example/SECRET"
    monkeypatch.setattr(webhook, "PAUSE", 0.0)
    for planned, told in (([None], 0), ([refused, None], 0), ([refused, TimeoutError("SECRET")], 1)):
        answers, posted, sentences = list(planned), [], []

        def post(*message, answers=answers, posted=posted):
            posted.append(message)
            if answer := answers.pop(0):
                raise answer

        monkeypatch.setattr(webhook, "post", post)
        webhook.deliver(url, "rank 1 hangs", sentences.append)
        assert posted == [(url, "rank 1 hangs")] * len(planned) and len(sentences) == told, planned
        assert all("chat.example" in said and "SECRET" not in said for said in sentences)


def test_the_command_ends_with_the_run_or_by_ctrl_c_and_its_exit_code_says_that_all_was_well(tmp_path, monkeypatch):
    def interrupted(sentence):
        raise KeyboardInterrupt

    for number, happens in enumerate((lambda _: Heartbeat(tmp_path / "0", rank=0).close(), interrupted)):
        monkeypatch.setattr(command, "_print_with_time", happens)
        assert command.main([str(tmp_path / str(number)), "--ranks", "1"]) == 0


def test_what_makes_no_sense_is_refused_before_anything_runs(tmp_path):
    urls = ("slack", "ftp://host/x", "http://", "https://ho st/", 7, "http://host:port/")
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
