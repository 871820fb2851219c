"""Leases of GPUs among real processes: never two on one GPU, in the order of asking, back when a holder is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from leasing import PATIENCE, names, python, until

from course_lib.launch.leases import NoTurn, Pool, lease, messages
from course_lib.launch.leases.state import Holder, Ticket

# A learner: takes 1 or 2 GPUs some times, holds each by a flag file too that only one process can make, and writes when it
# asked, had and gave back. With a number of its round it then holds for ever, until it is killed.
LEARNER = """
import json, os, random, sys, time
from course_lib.launch.leases import Pool
name, folder, flags, rounds, for_ever = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
dice, pool, log = random.Random(name), Pool(folder), os.open(f"{flags}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in range(rounds):
    n, asked = dice.choice((1, 2)), time.monotonic()
    with pool.lease(n, name=name, tell=lambda _: None) as lease:
        had, mine = time.monotonic(), lease.gpus
        for gpu in mine:
            os.close(os.open(f"{flags}/{gpu}", os.O_CREAT | os.O_EXCL))
        if number == for_ever:
            os.write(log, (json.dumps([name, mine, asked, had, None, os.getpid()]) + "\\n").encode())
            time.sleep(600)
        time.sleep(dice.uniform(0.005, 0.02))
        for gpu in mine:
            os.unlink(f"{flags}/{gpu}")
        gave = time.monotonic()
    os.write(log, (json.dumps([name, mine, asked, had, gave, os.getpid()]) + "\\n").encode())
"""


def read_log(flags: Path) -> list[list]:
    path = flags / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_sixteen_learners_on_four_gpus(tmp_path):
    """16 processes, 3 leases each of 1 or 2 GPUs; 5 of them are killed while they hold their second."""
    leases, flags = Pool(tmp_path / "leases", gpus=4), tmp_path / "flags"
    flags.mkdir()
    leases.make()
    doomed = {f"L{k}" for k in random.Random(1).sample(range(16), 5)}
    learners = {}
    for name in (f"L{k}" for k in range(16)):
        learners[name] = python(LEARNER, name, leases.folder, flags, 3, 1 if name in doomed else -1)
    try:
        while waiting := {name for name, learner in learners.items() if learner.poll() is None}:
            for name, mine, _, _, _, pid in [
                line for line in read_log(flags) if line[4] is None and line[0] in waiting
            ]:
                assert {h.gpu for h in leases.holders() if h.pid == pid} == set(mine)
                for gpu in mine:
                    (flags / str(gpu)).unlink()
                learners[name].kill()
                until(lambda pid=pid: pid not in {h.pid for h in leases.holders()})
                learners[name].wait()
            time.sleep(0.01)
    finally:
        for learner in learners.values():
            learner.kill()
            learner.wait()
    codes = {name: learner.returncode for name, learner in learners.items()}
    assert codes == {name: -signal.SIGKILL if name in doomed else 0 for name in learners}
    log = read_log(flags)
    assert len([line for line in log if line[4] is not None]) == 11 * 3 + 5 * 1  # everybody got all their turns
    assert {len(line[1]) for line in log} == {1, 2}
    held = defaultdict(list)
    for _, mine, _, had, gave, _ in log:
        for gpu in mine:
            held[gpu].append((had, gave or had))
    assert set(held) <= {0, 1, 2, 3}  # which of them were needed is the machine's affair
    for intervals in held.values():
        intervals.sort()
        assert all(before[1] <= after[0] for before, after in zip(intervals, intervals[1:], strict=False))
    assert leases.holders() == leases.waiting() == []


class Asking(threading.Thread):
    """Somebody who asks, and keeps the lease until told."""

    def __init__(self, leases: Pool, n: int, name: str, order: list[str]) -> None:
        super().__init__(daemon=True)
        self.arguments, self.leases, self.order, self.done = (n, name), leases, order, threading.Event()
        leases.make()
        before = len(leases.waiting()) + len(order)
        self.start()
        until(lambda: len(leases.waiting()) + len(order) > before)

    def run(self) -> None:
        n, name = self.arguments
        with self.leases.lease(n, name=name, tell=lambda _: None):
            self.order.append(name)
            self.done.wait(PATIENCE)

    def end(self) -> None:
        self.done.set()
        self.join(PATIENCE)


def test_nobody_overtakes_and_two_come_at_once(tmp_path):
    leases, order = Pool(tmp_path / "leases", gpus=2), []
    ada = Asking(leases, 1, "Ada", order)
    ben = Asking(leases, 2, "Ben", order)  # holds nothing meanwhile, and keeps Cem from the GPU that is free
    cem = Asking(leases, 1, "Cem", order)
    dora = Asking(leases, 1, "Dora", order)
    time.sleep(0.3)  # several looks of each
    assert names(leases) == ["Ada"] and [t.name for t in leases.waiting()] == ["Ben", "Cem", "Dora"]
    ada.end()
    until(lambda: names(leases) == ["Ben", "Ben"])
    assert [(t.name, t.wants) for t in leases.waiting()] == [("Cem", 1), ("Dora", 1)]
    ben.end()
    until(lambda: len(order) == 4)
    assert order == ["Ada", "Ben", "Cem", "Dora"]
    cem.end()
    dora.end()


def test_who_holds_something_lets_the_others_go_first(tmp_path):
    leases, order = Pool(tmp_path / "leases", gpus=2), []
    first, cem = Asking(leases, 1, "Ada", order), Asking(leases, 1, "Cem", order)
    second, ben = Asking(leases, 1, "Ada", order), Asking(leases, 1, "Ben", order)
    assert [t.name for t in leases.waiting()] == ["Ben", "Ada"]
    cem.end()
    until(lambda: len(order) == 3)
    assert order[2] == "Ben"
    for asking in (first, ben, second):
        asking.end()


def test_a_killed_waiter_is_skipped(tmp_path):
    leases, order = Pool(tmp_path / "leases", gpus=1), []
    with leases.lease():
        waiter = python(
            "import sys; from course_lib.launch.leases import Pool; Pool(sys.argv[1]).lease(name='W').take()",
            leases.folder,
            stdout=subprocess.PIPE,
        )
        assert waiter.stdout.readline().startswith(b"waiting for 1 of 1 GPUs: ")
        ben = Asking(leases, 1, "Ben", order)
        assert [t.name for t in leases.waiting()] == ["W", "Ben"]
        waiter.kill()
        waiter.communicate()
        assert [t.name for t in leases.waiting()] == ["Ben"]
    until(lambda: order == ["Ben"])
    ben.end()


FORKS = """
import os, sys, time
from course_lib.launch.leases import Pool
lease = Pool(sys.argv[1]).lease(1).take()
if os.fork() == 0:
    os.write(1, b"forked\\n")
    os.read(0, 1)  # until the test ends; it outlives its parent
    os._exit(0)
time.sleep(60)
"""


def test_a_fork_of_the_holder_does_not_keep_the_lease(tmp_path):
    leases = Pool(tmp_path / "leases", gpus=1)
    leases.make()
    holder = python(FORKS, leases.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"forked\n" and len(leases.holders()) == 1
    holder.kill()
    os.waitpid(holder.pid, 0)
    assert leases.holders() == []
    holder.stdin.close()
    assert holder.stdout.read() == b""  # the fork has ended


def test_the_end_of_a_wait(tmp_path):
    leases = Pool(tmp_path / "leases", gpus=2)
    with leases.lease(2, name="Ada") as lease:
        assert lease.gpus == (0, 1)
        assert lease.environment == {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        (first, second), told = leases.holders(), []
        assert (first.gpu, first.name, first.pid, second.gpu) == (0, "Ada", os.getpid(), 1)
        assert 0 <= time.time() - first.since < PATIENCE

        def ask(seconds):
            with pytest.raises(NoTurn, match=f"1 of 2 GPUs did not come free within {seconds:g} s: Ada has GPUs 0, 1"):
                leases.lease(1, name="Ben", wait=seconds, tell=told.append).take()

        for seconds in (0, 0.4):
            thread = threading.Thread(target=ask, args=(seconds,))
            thread.start()
            thread.join()
        assert len(told) == 1 and told[0].startswith("waiting for 1 of 2 GPUs: Ada has GPUs 0, 1 for ")
        assert told[0].endswith("; you are next")
        assert leases.waiting() == []
    assert lease.gpus == () and lease.environment == {} and leases.holders() == []


def test_a_sentence_again_when_something_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "TELL_SECONDS", 0.0)
    leases, order, told = Pool(tmp_path / "leases", gpus=2), [], []
    ada, ben = Asking(leases, 1, "Ada", order), Asking(leases, 1, "Ben", order)
    dora = threading.Thread(target=lambda: leases.lease(2, name="Dora", tell=told.append).take().give_back())
    dora.start()
    until(lambda: told)
    time.sleep(0.3)  # several looks, and nothing new
    assert len(told) == 1
    ben.end()
    until(lambda: len(told) == 2)
    ada.end()
    dora.join()
    assert "Ada has GPU 0 for" in told[0] and "Ben has GPU 1 for" in told[0]
    assert "GPU 1 is free; you are next" in told[1] and "Ben" not in told[1]
    assert told[2].startswith("your turn: GPUs 0, 1, after ") and len(told) == 3


def test_words():
    now = time.time()
    holders = [Holder(0, "Ada", 7, now - 200), Holder(1, "Ben", 8, now - 7500), Holder(3, "somebody", None, None)]
    before = [Ticket(k, name, k, 1, now, k) for k, name in enumerate(("Cem", "Dora", "Eva", "Finn"))]
    assert messages.waiting(1, 4, holders, before) == (
        "waiting for 1 of 4 GPUs: Ada has GPU 0 for 3 min, Ben has GPU 1 for 2 h 5 min, somebody has GPU 3; "
        "GPU 2 is free; 4 are before you (Cem, Dora, Eva, …)"
    )
