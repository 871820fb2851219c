"""How a rank's process ends: with what it has begun waited for, at once where it has failed, and never by SIGABRT."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from processes import PATIENCE, ROOT

# One of gloo's threads calls back while the interpreter is torn down, as a DDP communication hook's thread may: rank 1
# joins a collective of rank 0 after rank 0 has reached its end, and rank 0's teardown takes two seconds.
PAIR = """
import os, sys, time
import torch, torch.distributed as dist

folder, protected = sys.argv[1:]
rank = int(os.environ["RANK"])
if protected == "protected":
    import course_lib.launch


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2)


def end():
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    value = torch.ones(4)
    dist.all_reduce(value)
    if rank == 0:
        sys.modules["__main__"].slow = Slow()
        dist.all_reduce(value, async_op=True).get_future().then(lambda done: done.value())
        open(f"{folder}/ends", "w").close()
        return
    while not os.path.exists(f"{folder}/ends"):
        time.sleep(0.01)
    time.sleep(0.5)
    dist.all_reduce(value)
    dist.destroy_process_group()


end()
"""

# A rank that ends as a training program does, by `run`.
PROGRAM = """
import atexit, sys, threading, time
import torch, torch.distributed as dist
from course_lib.training.command_line import run
from course_lib.training.outcome import Outcome


class Late:
    def __del__(self, print=print):
        print("torn down")


def train(*, how: str = "") -> Outcome:
    rank, value = dist.get_rank(), torch.ones(4)
    if how == "ends":
        sys.modules["__main__"].late = Late()
        atexit.register(print, f"exit handler of rank {rank}")
        threading.Timer(0.5, print, [f"thread of rank {rank}"]).start()
    elif rank == 1:
        dist.all_reduce(value, async_op=True)
        if how == "exits":
            sys.exit(3)
        raise MemoryError("planted")
    else:
        dist.recv(value, src=1)
    return Outcome([0.0], "none", rank, dist.get_world_size(), 0.0, 0.0, {})


if __name__ == "__main__":
    run(train)
"""


@pytest.mark.parametrize("protected", ["bare", "protected"])
def test_a_thread_that_calls_back_at_the_end_aborts_only_who_did_not_wait_for_it(protected, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PAIR, str(tmp_path), protected],
            env=environment | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    aborted = -signal.SIGABRT if protected == "bare" else 0  # bare: PyTorch's own, and why the other one is here
    assert [rank.returncode for rank in ranks] == [aborted, 0], errors


def torchrun(tmp_path, how: str) -> subprocess.CompletedProcess:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*launcher, str(program), "--how", how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,  # a fifth of a group's own timeout
    )


def test_a_program_that_ends_leaves_out_nothing_but_the_teardown(tmp_path):
    ended = torchrun(tmp_path, "ends")
    assert ended.returncode == 0, ended.stderr
    for what in ("exit handler of rank", "thread of rank"):
        assert [ended.stdout.count(f"{what} {rank}") for rank in range(2)] == [1, 1], ended.stdout
    assert ended.stdout.count('"world_size": 2') == 1 and "torn down" not in ended.stdout


@pytest.mark.parametrize(("how", "status", "words"), [("fails", 1, "MemoryError: planted"), ("exits", 3, "")])
def test_a_program_that_fails_ends_at_once_with_its_reason(how, status, words, tmp_path):
    ended = torchrun(tmp_path, how)
    assert ended.returncode == 1
    assert words in ended.stderr and f"exitcode  : {status} " in ended.stderr and "SIGABRT" not in ended.stderr
