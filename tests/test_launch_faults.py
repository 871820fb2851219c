"""Every way in which ranks can end badly: the right exception, in time, who, where and why, and nothing left running."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from processes import PATIENCE, python, runs, until
from refusals import assert_refused

from course_lib.launch import RankFailed, RanksHung, launch
from course_lib.launch.failures import place

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")


def rank_fails(function, *args, ranks=3) -> RankFailed:
    """The failure of a launch, which comes long before its timeout: then it would be RanksHung."""
    with pytest.raises(RankFailed) as caught:
        launch(function, *args, ranks=ranks, timeout=120)
    return caught.value


def line_of(report: str, words: str) -> str:
    """The code that stands in backquotes behind these words of a report."""
    (code,) = re.findall(words + r"[^;`]*\(?test_launch_faults\.py, line \d+: `([^`]*)`", report)
    return code


def start_child(folder: str) -> None:
    """A process that would outlive its rank."""
    child = subprocess.Popen(["sleep", "1000"])
    open(f"{folder}/{child.pid}", "w").close()


def children_end(folder: Path, number: int) -> None:
    children = [int(pid) for pid in os.listdir(folder)]
    assert len(children) == number
    until(lambda: not any(map(runs, children)))


def others_wait() -> int:
    """Rank 1 goes on; the others wait for it in an all_reduce that it never joins."""
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1))
    time.sleep(1.0)  # they are in it by now
    return dist.get_rank()


def test_a_rank_that_raises_is_named_with_its_line_and_whom_it_took_down():
    def divide():
        others_wait()
        return 1 / 0

    failure = rank_fails(divide)
    assert (failure.rank, failure.cause_type, failure.cause_message) == (1, "ZeroDivisionError", "division by zero")
    assert failure.where.startswith("test_launch_faults.py, line ") and "return 1 / 0" in failure.where
    report = str(failure)
    assert failure.where in report and "ranks 0, 2 (waiting in all_reduce)" in report
    assert "in divide" in report and "course_lib" not in report and "elastic" not in report
    copy = pickle.loads(pickle.dumps(failure))
    assert (str(copy), copy.rank, copy.where) == (report, 1, failure.where)


def test_a_line_is_quoted_as_it_stands_now(tmp_path: Path):
    for line in ("x = 1", "x = 1 / 0"):
        (tmp_path / "train.py").write_text(line)
        assert place(str(tmp_path / "train.py"), 1) == f"train.py, line 1: `{line}`"


def test_a_rank_that_exits_dies_or_returns_early_is_named(tmp_path):
    def end(how):
        start_child(str(tmp_path))
        others_wait()
        if dist.get_rank() == 1 and how:
            how()

    ways = [
        ("sys.exit", lambda: sys.exit(3), "SystemExit", "3"),
        ("sys.exit with code 0", lambda: sys.exit(0), "SystemExit", "0"),
        ("os._exit with code 0", lambda: os._exit(0), "SystemExit", "code 0"),
        ("SIGKILL", lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL", "memory"),
        ("SIGSEGV", lambda: ctypes.string_at(0), "SIGSEGV", "SIGSEGV"),
    ]
    for name, how, cause, fragment in ways:
        failure = rank_fails(end, how)
        assert (failure.rank, failure.cause_type) == (1, cause), name
        assert fragment in failure.cause_message and "ranks 0, 2" in str(failure), name
    report = str(rank_fails(end, None))
    assert line_of(report, "ranks 0, 2 waited in all_reduce") == "dist.all_reduce(torch.ones(1))"
    assert "rank 1 never got there" in report
    failure = rank_fails(os._exit, 0, ranks=1)  # with code 0 and nobody waiting for it
    assert (failure.rank, failure.cause_type) == (0, "SystemExit")
    children_end(tmp_path, 6 * 3)


def test_a_rank_that_fails_is_heard_though_nobody_joins_what_it_has_begun():
    def begin_and_fail():
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1), async_op=True)
            raise MemoryError("planted")
        dist.recv(torch.ones(1), src=1)

    failure = rank_fails(begin_and_fail, ranks=2)
    assert (failure.rank, failure.cause_type, failure.cause_message) == (1, "MemoryError", "planted")


def test_calls_that_do_not_match_are_told_with_what_each_rank_calls():
    def different_sizes():
        print("about to reduce")
        dist.all_reduce(torch.ones(4 if dist.get_rank() == 0 else 6))

    def different_kinds():
        rank = dist.get_rank()
        work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else dist.barrier(async_op=True)
        time.sleep(1.0)
        return work.wait() if rank == 0 else 1 / 0

    def different_roots_wait():
        if dist.get_rank() == 2:
            time.sleep(1000)
        dist.broadcast(torch.ones(2, 1 + dist.get_rank()), src=2)

    with pytest.raises(RankFailed) as caught:
        launch(different_sizes, ranks=2, timeout=120, quiet=True)
    report, sizes = str(caught.value), "rank 0 (4,) of 16 bytes, rank 1 (6,) of 24 bytes"
    assert report.count("Ranks called") == 1
    assert f"Ranks called all_reduce with different shapes or dtypes: {sizes}." in report
    shown = report.partition("The last lines that the ranks printed:\n")[2]
    assert "about to reduce" in shown and "course_lib" not in shown and len(shown.splitlines()) <= 10, report
    assert "different collectives, where all must call one: rank 0 all_reduce, rank 1 barrier." in str(
        rank_fails(different_kinds, ranks=2)
    )
    report = hangs(different_roots_wait)
    assert (
        "Ranks called broadcast with different shapes or dtypes: rank 0 (2, 1) of 8 bytes, rank 1 (2, 2) of" in report
    )


def test_calls_that_may_differ_are_not_told_as_a_mistake():
    def legal():
        rank = dist.get_rank()
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        if rank < 2:  # rows of other sizes on each rank
            sizes = [[1, 2], [3, 4]]
            column = [row[rank] for row in sizes]
            dist.all_to_all_single(
                torch.empty(sum(column)), torch.ones(sum(sizes[rank])), column, sizes[rank], group=pair
            )
        else:  # the same numbers
            dist.all_reduce(torch.ones(*[(2, 3), (6,)][rank - 2]), group=pair)
        print("done")
        time.sleep(1.0 if rank == 3 else 1000)
        return 1 / 0

    def refused():
        def refusal():
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(torch.ones(1, 1).to_sparse_csr())  # gloo has no sum of them

        rank = dist.get_rank()
        if rank == 1:
            refusal()
        dist.broadcast(torch.ones(1), src=1)
        dist.all_reduce(torch.ones(3)) if rank == 0 else refusal() if rank == 2 else None
        time.sleep(1.0 if rank == 1 else 1000)
        return {}["planted"]

    for function, ranks, cause in ((legal, 4, "ZeroDivisionError"), (refused, 3, "KeyError")):
        failure = rank_fails(function, ranks=ranks)
        assert failure.cause_type == cause and "It took down" in str(failure)
        assert "Ranks called" not in str(failure) and "printed" not in str(failure), str(failure)


def hangs(function, *args, ranks=3, timeout=2.0) -> str:
    with pytest.raises(RanksHung) as caught:
        launch(function, *args, ranks=ranks, timeout=timeout)
    return str(caught.value)


def test_a_hang_says_who_waits_where_for_whom(tmp_path):
    def different():
        start_child(str(tmp_path))
        if dist.get_rank() == 0:
            dist.broadcast(torch.ones(1), src=1)
        elif dist.get_rank() == 1:
            while True:
                os.getpid()
        dist.all_reduce(torch.ones(1))

    def receive():
        dist.recv(torch.ones(1), src=1 - dist.get_rank())

    report = hangs(different, ranks=4)
    assert line_of(report, "rank 0 waits in broadcast") == "dist.broadcast(torch.ones(1), src=1)"
    assert line_of(report, "ranks 2, 3 wait in all_reduce") == "dist.all_reduce(torch.ones(1))"
    assert line_of(report, "rank 1 never got there") in ("while True:", "os.getpid()")
    assert "Ranks called" not in report  # it has just said so
    assert line_of(hangs(receive, ranks=2), "ranks 0, 1 wait in recv").startswith("dist.recv(")
    children_end(tmp_path, 4)


def test_what_ranks_started_ends_with_a_good_run_too(tmp_path):
    launch(start_child, str(tmp_path), ranks=2)
    children_end(tmp_path, 2)


def test_a_hang_inside_backward():
    def straggle():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        if dist.get_rank() == 1:
            time.sleep(1000)
        loss.backward()

    report = hangs(straggle, ranks=2)
    assert line_of(report, r"rank 0 waits in all_reduce, inside backward\(\)") == "loss.backward()"
    assert line_of(report, "rank 1 never got there") == "time.sleep(1000)"


def test_what_cannot_travel_and_impossible_calls_are_refused():
    lock = threading.Lock()

    def uses_lock():
        return lock

    def train(lr=0.1, steps=3):
        pass

    class OnlyThere:
        def __reduce__(self):
            return os.environ.__getitem__, ("ONLY_IN_THE_RANK",)

    assert_refused(
        [
            (lambda: launch(uses_lock, ranks=2), TypeError, "variable 'lock'"),
            (lambda: launch(train, ranks=2, steps=lock), TypeError, "argument 'steps'"),
            (lambda: launch(lambda: (i for i in range(3)), ranks=2), TypeError, "returned a generator"),
            (lambda: launch(OnlyThere, ranks=2), TypeError, "ONLY_IN_THE_RANK"),
            (lambda: launch(train, ranks=2, step=3), TypeError, "'steps'"),
            (lambda: launch(train, ranks=2, rank=3), TypeError, "'ranks'"),
            (lambda: launch(train(), ranks=2), TypeError, "NoneType"),
            (lambda: launch(train, ranks=0), ValueError, "ranks=0"),
            (lambda: launch(train, ranks=1, timeout=float("nan")), ValueError, "timeout=nan"),
            (lambda: launch(train, ranks=1, threads=0), ValueError, "threads=0"),
            (lambda: launch(train, ranks=2, backend="mpi"), ValueError, "'mpi'"),
            (lambda: launch(train, ranks=65, backend="nccl"), ValueError, "65 ranks"),
            (lambda: launch(lambda: launch(time.time, ranks=2), ranks=1), RankFailed, "inside a rank"),
        ]
    )


def test_a_rank_that_loses_a_peer_because_the_notebook_ended_clears_up(tmp_path):
    """The peer's report must not land in a folder that the others are just removing, nor its children outlive it."""
    program = (
        "import os, sys; from course_lib.launch import rank; os.setpgid(0, 0); rank._notebook = int(sys.argv[2]);"
        "rank._fail(0, sys.argv[1], 'raised', RuntimeError('Connection closed by peer'))"
    )
    ended = python("pass")
    ended.wait(PATIENCE)
    for notebook, code, left in ((os.getpid(), 1, True), (ended.pid, -signal.SIGKILL, False)):
        assert python(program, tmp_path, notebook).wait(PATIENCE) == code
        assert tmp_path.exists() == left
