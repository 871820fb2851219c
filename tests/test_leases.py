"""Leases of GPUs: never two on one GPU, in the order of asking, back however a holder ends; and a `launch` that waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest
from processes import PATIENCE, python, until

from course_lib.launch import launch
from course_lib.launch.leases import Lease, Pool

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

# A learner: takes 1 or 2 GPUs three times, and makes a file for each GPU that only one process can make. With a number of
# its round it then holds for ever, until it is killed.
LEARNER = """
import os, random, sys, time
from course_lib.launch.leases import Pool
name, folder, flags, for_ever = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
dice, pool = random.Random(name), Pool(folder)
for number in range(3):
    with pool.lease(dice.choice((1, 2)), name=name, tell=lambda _: None) as lease:
        for gpu in lease.gpus:
            os.close(os.open(f"{flags}/{gpu}", os.O_CREAT | os.O_EXCL))
        if number == for_ever:
            if os.fork() == 0:
                os.read(0, 1)  # a fork outlives its parent, and must not keep the lease
                os._exit(0)
            print(*lease.gpus, flush=True)
            time.sleep(600)
        time.sleep(dice.uniform(0.005, 0.02))
        for gpu in lease.gpus:
            os.unlink(f"{flags}/{gpu}")
"""
WAITER = """
import sys
from course_lib.launch.leases import Pool
Pool(sys.argv[1]).lease(name="Killed", tell=lambda text: print(text, flush=True)).take()
"""


def names(leases: Pool) -> list[str]:
    return [holder.name for holder in leases.holders()]


def ask(leases: Pool, n: int, name: str) -> Lease:
    """Somebody else asks, in a thread of its own: they have the GPUs, or wait for them from here on."""
    lease, waiting = leases.lease(n, name=name, tell=lambda _: None), len(leases.waiting())

    def have() -> None:
        lease.take()
        until(lambda: not lease.gpus)  # a thread that ended would leave its number, which the lease has, to the next

    threading.Thread(target=have, daemon=True).start()
    until(lambda: lease.gpus or len(leases.waiting()) > waiting)
    return lease


def test_never_two_learners_on_one_gpu(tmp_path):
    """10 processes on 4 GPUs, 3 leases each; 2 of them are killed while they hold their second."""
    leases, flags, doomed = Pool(tmp_path / "leases", gpus=4), tmp_path / "flags", ("L1", "L4")
    leases.make()
    flags.mkdir()
    learners = {}
    for name in (f"L{k}" for k in range(10)):
        arguments = name, leases.folder, flags, 1 if name in doomed else -1
        learners[name] = python(LEARNER, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        for name in doomed:
            gpus = {int(gpu) for gpu in learners[name].stdout.readline().split()}
            assert gpus and {h.gpu for h in leases.holders() if h.name == name} == gpus
            for gpu in gpus:
                (flags / str(gpu)).unlink()
            learners[name].kill()
            until(lambda name=name: name not in names(leases))
        codes = {name: learner.wait(PATIENCE) for name, learner in learners.items()}
    finally:
        for learner in learners.values():
            learner.kill()
            learner.communicate()
    assert codes == {name: -signal.SIGKILL if name in doomed else 0 for name in learners}
    assert leases.holders() == leases.waiting() == [] and os.listdir(flags) == []


def test_nobody_overtakes_two_gpus_come_at_once_and_a_killed_waiter_is_skipped(tmp_path):
    leases = Pool(tmp_path / "leases", gpus=2)
    leases.make()
    ada = ask(leases, 1, "Ada")
    ben = ask(leases, 2, "Ben")  # holds nothing meanwhile, and keeps the others from the GPU that is free
    killed = python(WAITER, leases.folder, stdout=subprocess.PIPE)
    assert "Ben" in killed.stdout.readline()  # it says whom it waits for
    cem = ask(leases, 1, "Cem")
    time.sleep(0.3)  # several looks of each
    assert names(leases) == ["Ada"]
    assert [(t.name, t.wants) for t in leases.waiting()] == [("Ben", 2), ("Killed", 1), ("Cem", 1)]
    ada.give_back()
    until(lambda: names(leases) == ["Ben", "Ben"])
    killed.kill()
    killed.communicate()
    assert [t.name for t in leases.waiting()] == ["Cem"]
    ben.give_back()
    until(lambda: names(leases) == ["Cem"])
    cem.give_back()


def test_who_holds_something_lets_the_others_go_first(tmp_path):
    leases = Pool(tmp_path / "leases", gpus=2)
    leases.make()
    ada, cem = ask(leases, 1, "Ada"), ask(leases, 1, "Cem")
    ada_again, ben = ask(leases, 1, "Ada"), ask(leases, 1, "Ben")
    assert [t.name for t in leases.waiting()] == ["Ben", "Ada"]
    cem.give_back()
    until(lambda: names(leases) == ["Ada", "Ben"])
    ben.give_back()
    until(lambda: ada_again.gpus)
    ada.give_back()
    ada_again.give_back()


# -------------------------------------------------------------------------------------------------------------- launch
@pytest.fixture
def leases(tmp_path, monkeypatch, no_leftovers) -> Pool:
    """A class's folder for 4 GPUs, on a machine that only rehearses having them."""
    monkeypatch.setenv("BEYOND_ONE_GPU_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("BEYOND_ONE_GPU_GPUS", "4")
    monkeypatch.setenv("BEYOND_ONE_GPU_NAME", "Ada")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)  # the machine may have some
    made = Pool(tmp_path / "leases", gpus=4)
    made.make()
    return made


def look(folder: str) -> tuple[str | None, list[tuple[int, str, int]]]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), [(h.gpu, h.name, h.pid) for h in Pool(folder).holders()]


def test_a_launch_waits_its_turn_and_its_ranks_see_what_was_leased(leases, capsys):
    before, waited, ben = os.environ.get("CUDA_VISIBLE_DEVICES"), 1.0, ask(leases, 3, "Ben")

    def free_them_when_somebody_waits() -> None:
        until(leases.waiting)
        time.sleep(waited)
        ben.give_back()

    thread = threading.Thread(target=free_them_when_somebody_waits)
    thread.start()
    began = time.perf_counter()
    run = launch(look, leases.folder, ranks=2)
    seconds = time.perf_counter() - began
    thread.join()
    assert run.results == [("0,1", [(0, "Ada", os.getpid()), (1, "Ada", os.getpid())])] * 2
    assert "Ben" in capsys.readouterr().out  # whom it waits for
    assert run.seconds < seconds - 0.9 * waited  # the wait is not the run's
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before and leases.holders() == []


def test_nothing_is_leased_where_no_gpu_is_wanted(leases, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")
    runs = [
        launch(look, leases.folder, ranks=1, backend="gloo", quiet=True),
        launch(look, leases.folder, ranks=5, quiet=True),  # more ranks than GPUs: they are on the CPU
    ]
    monkeypatch.delenv("BEYOND_ONE_GPU_LEASES")
    runs.append(launch(look, leases.folder, ranks=1, quiet=True))
    assert [run.results[0] for run in runs] == [("as it was", [])] * 3


@pytest.mark.parametrize("moment", ["running", "waiting"])
def test_ctrl_c_gives_it_back(leases, moment):
    ben = ask(leases, 4, "Ben") if moment == "waiting" else None

    def interrupt() -> None:
        until(leases.waiting if moment == "waiting" else leases.holders)
        time.sleep(0.5)
        for _ in range(2):  # an impatient learner
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        time.sleep(0.1)

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            launch(time.sleep, 600, ranks=2, timeout=600, quiet=True)
        finally:
            presser.join()  # the second press may find the launch ended
    until(lambda: names(leases) == ["Ben"] * 4 * (moment == "waiting"))
    assert leases.waiting() == []
    if ben:
        ben.give_back()
