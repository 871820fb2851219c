"""A rank is killed: torchrun starts all anew from the last checkpoint, or the next launch does, and nothing shows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch.distributed as dist

from course_lib.launch import RankFailed, launch
from course_lib.launch.rendezvous import restart_safe_init_method
from course_lib.training.resumable import program as resumable
from course_lib.training.resumable.journal import read

HOW = dict(steps=12, global_batch=4, seq_len=16, layers=1, hidden=32, save_every=3, warmup=2, lr=3e-3)
DEATH = dict(die_at=7, die_rank=1)  # SIGKILL, with one update done since the last save


@pytest.fixture(scope="module")
def undisturbed(private_tmp):
    return launch(resumable.train, ranks=1, quiet=True, timeout=120, **HOW).results[0]


def starts(folder) -> list[int]:
    return [event["step"] for event in read(folder) if event["event"] == "start"]


def test_torchrun_restarts_after_a_killed_rank_and_the_losses_do_not_show_it(undisturbed, tmp_path):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (HOW | DEATH).items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    program = ["-m", "course_lib.training.resumable.program", *options, "--checkpoint-dir", str(tmp_path)]
    output = subprocess.run([*torchrun, *program], stdout=subprocess.PIPE, text=True, check=True, timeout=240).stdout
    outcome = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert starts(tmp_path) == [0, 6] and outcome["world_size"] == 2
    assert outcome["losses"] == undisturbed.losses
    assert outcome["extra"]["fingerprint"] == undisturbed.extra["fingerprint"]


def test_the_next_launch_goes_on_after_a_killed_rank_and_the_losses_do_not_show_it(undisturbed, tmp_path):
    run = dict(quiet=True, timeout=120, **HOW, checkpoint_dir=str(tmp_path))
    with pytest.raises(RankFailed, match="SIGKILL"):
        launch(resumable.train, ranks=2, **run, **DEATH)
    outcome = launch(resumable.train, ranks=1, **run).results[0]
    assert starts(tmp_path) == [0, 6]
    assert outcome.losses == undisturbed.losses
    assert outcome.extra["fingerprint"] == undisturbed.extra["fingerprint"]


def test_each_life_of_a_job_has_a_part_of_the_store_to_itself(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    life = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.port), RANK="0", WORLD_SIZE="1", GROUP_WORLD_SIZE="1")
    for name, value in (life | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}).items():
        monkeypatch.setenv(name, value)
    first, *_ = next(dist.rendezvous(restart_safe_init_method()))
    first.set("address", "of a rank that will die")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second, rank, world_size = next(dist.rendezvous(restart_safe_init_method()))
    assert first.check(["address"]) and not second.check(["address"]) and (rank, world_size) == (0, 1)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert restart_safe_init_method() == "env://"
