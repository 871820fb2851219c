"""A rank is killed: torchrun starts all anew from the last checkpoint, or the next launch does, and nothing shows."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time

import cloudpickle
import psutil
import pytest
import torch.distributed as dist

from course_lib import checkpoints
from course_lib.launch import RankFailed, launch
from course_lib.launch.commands import Background
from course_lib.launch.rendezvous import restart_safe_init_method
from course_lib.training.resumable import program as resumable
from course_lib.training.resumable.journal import read

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOW = dict(steps=30, global_batch=4, seq_len=16, layers=1, hidden=32, save_every=3, warmup=2, lr=3e-3)


@pytest.fixture(scope="module")
def undisturbed(private_tmp):
    return launch(resumable.train, ranks=1, quiet=True, timeout=120, **HOW).results[0]


def newest_step(folder):
    return max((event["step"] for event in read(folder) if event["event"] == "step"), default=-1)


def wait_for(step, folder, process):
    deadline = time.monotonic() + 150
    while newest_step(folder) < step:
        assert time.monotonic() < deadline and process.is_running()
        time.sleep(0.005)


def rank_below(process, rank):
    """The process below a torchrun that is this rank."""
    found = {}
    for child in process.children(recursive=True):
        try:
            if "resumable" in " ".join(child.cmdline()) and "RANK" in child.environ():
                found[int(child.environ()["RANK"])] = child
        except psutil.Error:  # it ended meanwhile
            continue
    return found.get(rank)


def test_torchrun_restarts_after_a_killed_rank_and_the_losses_do_not_show_it(undisturbed, tmp_path):
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in HOW.items())
    module = "-m course_lib.training.resumable.program"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = f"--master_addr 127.0.0.1 --master_port {free.getsockname()[1]}"
    command = Background(
        f"torchrun --nproc_per_node 2 --max-restarts 3 {port} {module} {options} --checkpoint-dir {tmp_path}"
    )
    try:
        top = psutil.Process(command._process.pid)
        wait_for(0, tmp_path, top)
        victim = rank_below(top, 1)  # found in time; it dies later
        wait_for(7, tmp_path, top)
        everybody = top.children(recursive=True)
        victim.kill()
        output = command.wait(200)
        everybody += [
            child for child in psutil.Process().children(recursive=True) if "resumable" in str(child.cmdline())
        ]
    finally:
        command.end()
    outcome = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    starts = [event["step"] for event in read(tmp_path) if event["event"] == "start"]
    assert len(starts) == 2 and starts[0] == 0 and starts[1] >= 6 and starts[1] % 3 == 0
    assert outcome["extra"]["first_step"] == starts[1] and outcome["world_size"] == 2
    assert outcome["losses"] == undisturbed.losses
    assert outcome["extra"]["fingerprint"] == undisturbed.extra["fingerprint"]
    assert not psutil.wait_procs(everybody, timeout=60)[1]


def kill_while_saving(change):
    """SIGKILL to this process before the ``change``-th change of the disk in a save."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        saving = event in ("os.rename", "os.mkdir") or (event == "open" and isinstance(args[2], int) and args[2] & 3)
        if saving and ".part-" in str(args[0]):
            seen += 1
            if seen == change:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def struck(folder, how, seed):
    """Train until this happens: rank 1 dies before update 7, rank 0 in the middle of a save, or both at some moment."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if how == "while saving" and dist.get_rank() == 0:
        kill_while_saving(3)
    elif how == "all" and dist.get_rank() == 1:

        def strike():
            begun = newest_step(folder)
            while newest_step(folder) < begun + 4:
                time.sleep(0.002)
            time.sleep(random.Random(seed).uniform(0, 0.1))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        threading.Thread(target=strike, daemon=True).start()
    resumable.train(**HOW, checkpoint_dir=folder, die_at=7 if how == "one" else -1, die_rank=1)


def test_three_kills_lose_nothing_beyond_the_last_checkpoint(undisturbed, tmp_path):
    folder, found = str(tmp_path), []
    for seed, how in enumerate(("one", "while saving", "all")):
        with pytest.raises(RankFailed, match="SIGKILL"):
            launch(struck, folder, how, seed, ranks=2, quiet=True, timeout=100)
        whole = checkpoints.latest(folder, tell=lambda _: None)
        found.append((checkpoints.verify(whole).step, newest_step(folder)))
    parts = [name for name in os.listdir(folder) if ".part-" in name]
    last = launch(resumable.train, ranks=1, quiet=True, timeout=100, checkpoint_dir=folder, **HOW).results[0]
    assert last.losses == undisturbed.losses and last.extra["fingerprint"] == undisturbed.extra["fingerprint"]
    assert [event["step"] for event in read(folder) if event["event"] == "start"] == [0, *(step for step, _ in found)]
    # Rank 0 may be ended before it has written down update 6, behind which rank 1 died.
    assert found[0] in ((6, 5), (6, 6)) and all(done + 1 - step <= HOW["save_every"] for step, done in found), (
        found,
        parts,
    )
    steps = [step for step, _ in found]
    assert steps == sorted(steps) and not [name for name in os.listdir(folder) if ".part-" in name]


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
