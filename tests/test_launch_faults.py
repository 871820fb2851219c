"""Every way in which ranks can end badly: the right exception, in time, in words that help, and nothing left running."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RankFailed, RanksHung, launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")


def rank_fails(function, *args, ranks=3, **kwargs) -> RankFailed:
    """The failure of a launch, which comes long before its timeout: then it would be RanksHung."""
    with pytest.raises(RankFailed) as caught:
        launch(function, *args, ranks=ranks, timeout=120, **kwargs)
    return caught.value


def others_wait() -> int:
    """Rank 1 goes on; the others wait for it in an all_reduce that it never joins."""
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1))
    time.sleep(1.0)  # they are in it by now
    return dist.get_rank()


def test_one_rank_raises():
    def divide():
        others_wait()
        return 1 / 0

    failure = rank_fails(divide)
    assert (failure.rank, failure.cause_type, failure.cause_message) == (1, "ZeroDivisionError", "division by zero")
    assert failure.where.startswith("test_launch_faults.py, line ") and "return 1 / 0" in failure.where
    text = str(failure)
    assert text.startswith("rank 1 raised ZeroDivisionError: division by zero\n    at test_launch_faults.py, line")
    assert "It took down ranks 0, 2 (waiting in all_reduce)." in text
    assert "in divide" in text and "course_lib" not in text and "elastic" not in text
    copy = pickle.loads(pickle.dumps(failure))
    assert (str(copy), copy.rank, copy.where) == (text, 1, failure.where)


def test_every_rank_raises():
    def stub():
        raise NotImplementedError("write me")

    failure = rank_fails(stub, ranks=4)
    assert failure.cause_type == "NotImplementedError" and "write me" in str(failure)


def test_raises_in_an_imported_module(tmp_path, monkeypatch):
    (tmp_path / "helper_of_mine.py").write_text("def check(x):\n    assert x > 3, 'too small'\n")
    (tmp_path / "wrong_syntax.py").write_text("x = 1\nif x\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def use_helper():
        import helper_of_mine

        helper_of_mine.check(2)

    def use_wrong():
        import wrong_syntax  # noqa: F401

    failure = rank_fails(use_helper, ranks=2)
    assert failure.cause_type == "AssertionError" and failure.where.startswith("helper_of_mine.py, line 2: `assert")
    failure = rank_fails(use_wrong, ranks=2)
    assert failure.cause_type == "SyntaxError" and failure.where.startswith("wrong_syntax.py, line 2: `if x`")


def test_exits():
    def leave(how, code):
        others_wait()
        if dist.get_rank() == 1:
            how(code)

    failure = rank_fails(leave, sys.exit, 3)
    assert (failure.rank, failure.cause_type, failure.cause_message) == (1, "SystemExit", "3")
    failure = rank_fails(leave, sys.exit, 0)
    assert (failure.rank, failure.cause_type) == (1, "SystemExit")
    for code in (0, 3):
        failure = rank_fails(leave, os._exit, code)
        assert failure.rank == 1 and f"rank 1 ended itself with exit code {code} before it returned" in str(failure)
    failure = rank_fails(os._exit, 0, ranks=1)  # with code 0 and nobody waiting for it
    assert failure.rank == 0 and "exit code 0" in str(failure)


def test_signals():
    def die(number):
        others_wait()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), number)

    def crash():
        others_wait()
        if dist.get_rank() == 1:
            ctypes.string_at(0)

    failure = rank_fails(die, signal.SIGKILL)
    assert (failure.rank, failure.cause_type) == (1, "SIGKILL") and "out of memory" in str(failure)
    assert "It took down ranks 0, 2" in str(failure)
    failure = rank_fails(crash)
    assert (failure.rank, failure.cause_type) == (1, "SIGSEGV")


def test_one_rank_returns_early():
    failure = rank_fails(others_wait)
    assert "ranks 0, 2 waited in all_reduce (test_launch_faults.py, line" in str(failure)
    assert "rank 1 never got there: the function had already returned" in str(failure)


def hangs(function, *args, ranks=3, timeout=2.0) -> str:
    with pytest.raises(RanksHung) as caught:
        launch(function, *args, ranks=ranks, timeout=timeout)
    return str(caught.value)


def test_hangs_in_a_collective_and_in_python():
    def mixed():
        if dist.get_rank() == 1:
            while True:
                pass
        dist.all_reduce(torch.ones(1))

    def everybody_works():
        time.sleep(100)

    def different():
        if dist.get_rank() == 0:
            dist.broadcast(torch.ones(1), src=1)
        else:
            dist.all_reduce(torch.ones(1))

    def receive():
        dist.recv(torch.ones(1), src=1 - dist.get_rank())

    text = hangs(mixed, ranks=4)
    assert text.startswith("no result after 2 s. ranks 0, 2, 3 wait in all_reduce (test_launch_faults.py, line ")
    assert "rank 1 never got there: it is in test_launch_faults.py, line" in text
    assert "`while True:`" in text or "`pass`" in text
    text = hangs(everybody_works, ranks=2)
    assert "ranks 0, 1 are in test_launch_faults.py, line" in text and "time.sleep(100)" in text
    text = hangs(different, ranks=2)
    assert "rank 0 waits in broadcast" in text and "rank 1 waits in all_reduce" in text
    assert "ranks 0, 1 wait in recv (test_launch_faults.py, line" in hangs(receive, ranks=2)


def test_hangs_inside_backward():
    def straggle():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        if dist.get_rank() == 1:
            time.sleep(1000)
        loss.backward()

    text = hangs(straggle, ranks=2)
    assert "rank 0 waits in all_reduce, inside backward() (test_launch_faults.py, line" in text
    assert "`loss.backward()`" in text and "rank 1 never got there" in text and "`time.sleep(1000)`" in text


def test_what_cannot_travel():
    lock = threading.Lock()

    def uses_lock():
        return lock

    def takes(x):
        pass

    def returns_generator():
        return (i for i in range(3))

    class OnlyThere:
        def __reduce__(self):
            return os.environ.__getitem__, ("ONLY_IN_THE_RANK",)

    with pytest.raises(TypeError, match=r"variable 'lock' \(lock\) cannot travel to the ranks"):
        launch(uses_lock, ranks=2)
    with pytest.raises(TypeError, match=r"argument 'x' \(generator\) cannot travel to the ranks"):
        launch(takes, ranks=2, x=(i for i in range(3)))
    with pytest.raises(TypeError, match="rank [01] returned a generator that cannot travel back"):
        launch(returns_generator, ranks=2)
    with pytest.raises(TypeError, match=r"Return plain values or tensors.*full_tensor"):
        launch(OnlyThere, ranks=2)


def test_a_large_result_comes_back():
    run = launch(lambda: torch.full((50_000_000,), 7.0), ranks=1)
    assert run.results[0].nbytes == 200_000_000 and run.results[0][-1] == 7


@pytest.mark.parametrize("ranks", [0, -1, True, "2", 2.0, None])
def test_wrong_number_of_ranks(ranks):
    with pytest.raises(ValueError, match="give the number of processes to start, 1 or more"):
        launch(time.time, ranks=ranks)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "60", None])
def test_wrong_timeout(timeout):
    with pytest.raises(ValueError, match="give the seconds that the ranks may take"):
        launch(time.time, ranks=1, timeout=timeout)


def test_wrong_arguments():
    def train(lr=0.1, steps=3):
        pass

    with pytest.raises(TypeError, match="no argument 'step'. Did you mean 'steps'"):
        launch(train, ranks=2, step=3)
    with pytest.raises(TypeError, match="no argument 'rank'. Did you mean 'ranks'"):
        launch(train, ranks=2, rank=3)
    with pytest.raises(TypeError, match="cannot be called with what launch"):
        launch(train, 1, 2, 3, ranks=2)
    with pytest.raises(TypeError, match="takes the function itself"):
        launch(train(), ranks=2)
    with pytest.raises(ValueError, match="'mpi' is not one of 'nccl', 'gloo'"):
        launch(train, ranks=2, backend="mpi")
    with pytest.raises(ValueError, match="NCCL needs one GPU a rank: you asked for 65 ranks"):
        launch(train, ranks=65, backend="nccl")


def test_launch_inside_a_rank():
    failure = rank_fails(lambda: launch(time.time, ranks=2), ranks=2)
    assert failure.cause_type == "RuntimeError" and "called inside a rank: the ranks are up already" in str(failure)


@pytest.mark.parametrize("ending", ["return", "raise", "kill", "exit", "hang"])
def test_what_a_rank_started_ends_with_it(ending, tmp_path):
    def start_children(ending, folder):
        from torch.utils.data import DataLoader

        child = subprocess.Popen(["sleep", "1000"])
        loader = iter(DataLoader(range(1000), num_workers=1, prefetch_factor=2))
        next(loader)
        workers = [str(p.pid) for p in psutil.Process().children()]
        with open(f"{folder}/{dist.get_rank()}", "w") as file:
            file.write(" ".join(workers))
        assert len(workers) == 2 and child.poll() is None
        dist.barrier()
        if ending == "hang":
            time.sleep(1000)
        if dist.get_rank() == 1 and ending != "return":
            {"raise": [].pop, "kill": lambda: os.kill(os.getpid(), 9), "exit": lambda: os._exit(3)}[ending]()

    expected = {"raise": RankFailed, "kill": RankFailed, "exit": RankFailed, "hang": RanksHung}
    if ending == "return":
        launch(start_children, ending, str(tmp_path), ranks=2)
    else:
        with pytest.raises(expected[ending]):
            launch(start_children, ending, str(tmp_path), ranks=2, timeout=5.0 if ending == "hang" else 120)
    children = [int(pid) for rank in (0, 1) for pid in (tmp_path / str(rank)).read_text().split()]
    assert len(children) == 4
    deadline = time.monotonic() + 30
    while (alive := [p for p in children if _runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
