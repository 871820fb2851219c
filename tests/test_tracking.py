"""Every rank's metrics go to files and come back; a tracker that fails costs a sentence, and no training."""

from __future__ import annotations

import glob
import math
import os
import resource
import time
from contextlib import contextmanager

import psutil
import pytest

from course_lib.launch import launch
from course_lib.observe import tracking
from course_lib.observe.tracking import Tracker, read

STEPS = 50


def log_on_every_rank(folder: str, steps: int) -> dict:
    """What each rank does; returns by tracker the seconds to open it, of one log call, and to close it."""
    import time

    import torch
    import torch.distributed as dist

    from course_lib.observe.tracking import Tracker

    rank, seconds = dist.get_rank(), {}
    for to in ("tensorboard", "wandb"):
        began = time.perf_counter()
        tracker = Tracker(f"{folder}/{to}", to=to, rank=rank, world_size=2)
        opened = time.perf_counter()
        for step in range(steps):
            loss = torch.tensor(1.0 / (step + 1)) + rank  # tensors are read
            tracker.log(step, loss=loss, tokens_per_second=100 * (rank + 1), skipped=None)
        logged = time.perf_counter()
        tracker.close()
        closed = time.perf_counter()
        seconds[to] = (opened - began, (logged - opened) / steps, closed - logged)
        assert not tracker.problem, tracker.problem
    return seconds


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run = launch(log_on_every_rank, str(folder), STEPS, ranks=2, timeout=120, quiet=True, backend="gloo")
    for to, (opening, a_call, closing) in run.results[1].items():
        print(f"{to}: {opening:.2f} s to open, {a_call * 1e3:.3f} ms a log call, {closing:.2f} s to close")
    return folder


def test_every_metric_of_every_rank_comes_back(logged):
    began = time.time()
    found = read(logged / "tensorboard")
    assert sorted(found) == [0, 1]
    for rank, numbers in found.items():
        assert sorted(numbers) == ["loss", "tokens_per_second"]
        steps, values, times = zip(*numbers["loss"], strict=True)
        assert list(steps) == list(range(STEPS)) and all(began - 600 < when < began + 1 for when in times)
        assert values == pytest.approx([1 / (step + 1) + rank for step in range(STEPS)])
        assert {value for _, value, _ in numbers["tokens_per_second"]} == {100.0 * (rank + 1)}


def test_wandb_stayed_offline_and_left_no_process(logged):
    files = glob.glob(f"{logged}/wandb/rank*/wandb/offline-run-*/*.wandb")
    assert len(files) == 2
    for path in files:
        with open(path, "rb") as file:
            content = file.read()
        assert content.count(b"tokens_per_second") >= STEPS  # a row per step
    with pytest.raises(ValueError, match="wandb sync"):
        read(logged / "wandb")
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "wandb" in name]


@contextmanager
def small_disk():
    """No file of this process may grow beyond 50 kB: to whoever writes one, the disk is full. Also to pytest's own log."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_sentence_and_training_goes_on(tmp_path, capsys):
    with small_disk(), Tracker(tmp_path, rank=1) as tracker:
        for step in range(5000):
            tracker.log(step, loss=1.0)
    said = capsys.readouterr().err
    assert said.count("training goes on") == 1 and "rank 1" in said and tracker.problem in said
    assert len(read(tmp_path)[1]["loss"]) > 100  # what came before is whole


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    with Tracker(tmp_path / "file", rank=0) as tracker:
        tracker.log(0, loss=1.0)
        tracker.log(1, loss=1.0)
    said = capsys.readouterr().err
    assert said.count("cannot write") == 1 and tracker.problem in said


def test_a_resumed_run_counts_what_it_did_last_and_a_torn_file_is_read_as_far_as_it_goes(tmp_path):
    for first, values in ((0, [5.0, 4.0, 3.0]), (1, [2.5, math.nan])):
        with Tracker(tmp_path, rank=0, world_size=1) as tracker:
            for step, value in enumerate(values, first):
                tracker.log(step, loss=value)
    series = read(tmp_path)[0]["loss"]
    assert [(step, value) for step, value, _ in series][:2] == [(0, 5.0), (1, 2.5)] and math.isnan(series[2][1])
    last = sorted(glob.glob(f"{tmp_path}/rank0/*"))[-1]
    os.truncate(last, os.path.getsize(last) - 5)
    assert [value for _, value, _ in read(tmp_path)[0]["loss"]] == [5.0, 2.5, 3.0]


@pytest.mark.parametrize("wrong", [{"to": "paper"}, {"rank": -1}, {"rank": 2, "world_size": 2}, {"rank": True}])
def test_a_tracker_that_makes_no_sense_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError):
        Tracker(tmp_path, **wrong)


def test_numbers_and_nothing_else(tmp_path):
    with Tracker(tmp_path, to="none") as tracker, pytest.raises((TypeError, ValueError)):
        tracker.log(0, loss="low")
    for empty in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ValueError, match="folder of a rank"):
            read(empty)
    (tmp_path / "rank0").mkdir()
    with pytest.raises(ValueError, match="no metric"):
        read(tmp_path)
    with pytest.raises(AttributeError):
        _ = tracking.Nothing
