"""Every rank's metrics go to files and come back; a tracker that fails costs a sentence, and no training."""

from __future__ import annotations

import glob
import math
import os

import pytest
import torch
from refusals import assert_refused

from course_lib.observe.tracking import Tracker, read
from course_lib.observe.tracking.event_files import EventFiles


def test_every_metric_of_every_rank_comes_back(tmp_path):
    for rank in (0, 1):
        with Tracker(tmp_path, rank=rank) as tracker:
            for step in range(50):
                loss = torch.tensor(1.0 / (step + 1)) + rank  # tensors are read
                tracker.log(step, loss=loss, tokens_per_second=100 * (rank + 1), skipped=None)
            with pytest.raises((TypeError, ValueError)):
                tracker.log(50, loss="low")
            assert len(read(tmp_path)[rank]["loss"]) == 50  # it is there before the rank ends, which may be killed
    metrics = read(tmp_path)
    assert sorted(metrics) == [0, 1]
    for rank, numbers in metrics.items():
        assert sorted(numbers) == ["loss", "tokens_per_second"]
        steps, values, times = zip(*numbers["loss"], strict=True)
        assert steps == tuple(range(50)) and min(times) > 1.7e9  # seconds since 1970
        assert values == pytest.approx([1 / (step + 1) + rank for step in range(50)])
        assert {value for _, value, _ in numbers["tokens_per_second"]} == {100.0 * (rank + 1)}


def test_a_disk_that_fails_is_one_sentence_and_training_goes_on(tmp_path, capsys, monkeypatch):
    with Tracker(tmp_path, rank=1) as tracker:
        tracker.log(0, loss=1.0)
        with monkeypatch.context() as patch:
            patch.setattr(EventFiles, "log", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            tracker.log(1, loss=1.0)
        tracker.log(2, loss=1.0)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "rank 1" in printed and "No space left" in tracker.problem
    assert [step for step, *_ in read(tmp_path)[1]["loss"]] == [0]  # what came before is whole
    (tmp_path / "file").write_text("in the way")
    with Tracker(tmp_path / "file", rank=0) as tracker:
        tracker.log(0, loss=1.0)
    assert tracker.problem and tracker.problem in capsys.readouterr().err


def test_a_resumed_run_counts_what_it_did_last_and_a_torn_file_is_read_as_far_as_it_goes(tmp_path):
    for first, values in ((0, [5.0, 4.0, 3.0]), (1, [2.5, math.nan])):
        with Tracker(tmp_path, rank=0) as tracker:
            for step, value in enumerate(values, first):
                tracker.log(step, loss=value)
    series = read(tmp_path)[0]["loss"]
    assert [(step, value) for step, value, _ in series][:2] == [(0, 5.0), (1, 2.5)] and math.isnan(series[2][1])
    last = sorted(glob.glob(f"{tmp_path}/rank0/*"))[-1]
    os.truncate(last, os.path.getsize(last) - 5)
    assert [value for _, value, _ in read(tmp_path)[0]["loss"]] == [5.0, 2.5, 3.0]


def test_what_cannot_be_tracked_or_read_is_refused(tmp_path):
    (tmp_path / "empty" / "rank0").mkdir(parents=True)
    assert_refused(
        [
            (lambda: Tracker(tmp_path, rank=-1), ValueError, "rank=-1"),
            (lambda: Tracker(tmp_path, rank=True), ValueError, "rank=True"),
            (lambda: read(tmp_path / "nothing"), ValueError, "folder of a"),
            (lambda: read(tmp_path / "empty"), ValueError, "no metric"),
        ]
    )
