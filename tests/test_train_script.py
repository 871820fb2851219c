"""The program that lesson 7 shows, lessons/07_axolotl/train.py: killed, asked to stop, started again, and at a spike."""

from __future__ import annotations

import itertools
import json
import math
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from course_lib.checkpoints import latest
from course_lib.checkpoints.folder import read_manifest
from course_lib.launch import RankFailed, launch, rank_device

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = Path(__file__).resolve().parents[1] / "lessons" / "07_axolotl" / "train.py"
STEPS, SAVE_EVERY = 12, 4


def run(folder: str, number: int | None = None, at: int = 0) -> None:
    """Train in a rank; rank 1 gets the signal of this number after its update `at`."""
    updates = itertools.count(1)

    def send(*_: object) -> None:
        if next(updates) == at and dist.get_rank() == 1:
            os.kill(os.getpid(), number)

    if number is not None:
        register_optimizer_step_post_hook(send)
    runpy.run_path(str(SCRIPT))["train"](rank_device(), folder, STEPS, SAVE_EVERY)


def wait_for_the_dead(folder: str) -> None:
    """Rank 0 is asked to stop in a collective that its peer never joins."""
    train = runpy.run_path(str(SCRIPT))["train"]
    real = signal.alarm
    signal.alarm = lambda seconds: real(min(seconds, 1))

    def begin(*_: object, **__: object) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            dist.barrier()
        time.sleep(600)

    train.__globals__["sample_batch"] = begin
    train(rank_device(), folder, STEPS, SAVE_EVERY)


def test_a_rank_that_waits_for_a_dead_peer_ends_when_it_is_asked(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGALRM"):
        launch(wait_for_the_dead, str(tmp_path), ranks=2, quiet=True, timeout=60)


def asked_twice(folder: str) -> None:
    """Rank 0 is asked after update 6; rank 1, which has agreed by then, in a save that lasts longer than the alarm."""
    train = runpy.run_path(str(SCRIPT))["train"]
    names, real, updates = train.__globals__, signal.alarm, itertools.count(1)
    save = names["save"]
    signal.alarm = lambda seconds: real(min(seconds, 1))

    def slow_save(*given: object, **named: object) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2)
        save(*given, **named)

    def ask(*_: object) -> None:
        if next(updates) == 6:
            names["save"] = slow_save
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(ask)
    train(rank_device(), folder, STEPS, SAVE_EVERY)


def test_a_signal_that_comes_in_the_save_does_not_end_it(tmp_path: Path) -> None:
    launch(asked_twice, str(tmp_path), ranks=2, quiet=True, timeout=60)
    assert latest(tmp_path).name == "step-00000006"


def losses(log: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in map(json.loads, log.splitlines()) if "loss" in line}


def test_a_killed_and_a_stopped_run_go_on_with_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    how = {"ranks": 2, "quiet": True, "threads": 1, "timeout": 120}
    whole = losses(launch(run, str(tmp_path / "whole"), **how).logs[0])
    assert list(whole) == list(range(1, STEPS + 1))

    with pytest.raises(RankFailed):
        launch(run, str(tmp_path / "killed"), signal.SIGKILL, 7, **how)
    resumed = losses(launch(run, str(tmp_path / "killed"), **how).logs[0])
    assert resumed == {step: loss for step, loss in whole.items() if step > SAVE_EVERY}

    # one rank is asked, both save at the same step, which is none of those that are saved in any case
    before = losses(launch(run, str(tmp_path / "stopped"), signal.SIGTERM, 6, **how).logs[0])
    assert max(before) == 6 and latest(tmp_path / "stopped").name == "step-00000006"
    assert before | losses(launch(run, str(tmp_path / "stopped"), **how).logs[0]) == whole


def skip_once(folder: str) -> tuple[int, int]:
    """Train with one spike; how often the weights were updated, and the position in the data at the end."""
    train = runpy.run_path(str(SCRIPT))["train"]
    updates, judged = itertools.count(), itertools.count()
    train.__globals__["is_spike"] = lambda loss, recent: next(judged) == 5
    register_optimizer_step_post_hook(lambda *_: next(updates))
    train(rank_device(), folder, STEPS, SAVE_EVERY)
    return next(updates), read_manifest(latest(folder)).extra["position"]


def test_a_spike_costs_its_batch_and_no_update(tmp_path: Path) -> None:
    done = launch(skip_once, str(tmp_path), ranks=1, quiet=True, timeout=120)
    assert done.results[0] == (STEPS, STEPS + 1)
    lines = [json.loads(line) for line in done.logs[0].splitlines()]
    assert [(line["step"], line["skipped"]) for line in lines if "skipped" in line] == [(5, 5)]


def only_spikes(folder: str) -> None:
    train = runpy.run_path(str(SCRIPT))["train"]
    train.__globals__["is_spike"] = lambda loss, recent: True
    train(rank_device(), folder, STEPS, SAVE_EVERY)


def test_a_run_of_spikes_ends_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="RuntimeError"):
        launch(only_spikes, str(tmp_path), ranks=1, quiet=True, timeout=60)


def test_a_spike_is_far_above_the_last_losses() -> None:
    is_spike = runpy.run_path(str(SCRIPT))["is_spike"]
    steady = [3.0 + 0.01 * (-1) ** n for n in range(16)]
    falling = [6.0 * 0.97**n for n in range(32)]
    assert is_spike(math.nan, []) and is_spike(math.inf, steady)
    assert is_spike(3.6, steady) and not is_spike(3.3, steady)  # 2 % of the median, 8 times
    assert not is_spike(600.0, steady[:7])  # too early to say
    assert not any(is_spike(falling[n], falling[:n]) for n in range(32))
    assert is_spike(50.0, [*steady, 40.0, 45.0])  # spikes among them do not move the median
