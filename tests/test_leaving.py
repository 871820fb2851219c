"""How a rank's process ends: with what it has begun waited for, at once where it has failed, and never by SIGABRT."""

from __future__ import annotations

import json
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
import sys, time
import torch, torch.distributed as dist
from course_lib.observe import Outcome
from course_lib.training.command_line import run


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2)


def train(*, how: str = "") -> Outcome:
    rank, value = dist.get_rank(), torch.ones(4)
    if how == "held":  # something keeps the group, and with it a thread that wants to call back
        main = sys.modules["__main__"]
        main.group, main.slow = dist.group.WORLD, Slow()
        work = dist.all_reduce(value, async_op=True)
        work.get_future().then(lambda done: time.sleep(1))
        work.wait()
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


def torchrun(tmp_path, how: str, ranks: int) -> subprocess.CompletedProcess:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, str(program), "--how", how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,  # a fifth of a group's own timeout
    )


def test_a_program_ends_well_though_something_holds_its_group(tmp_path):
    ended = torchrun(tmp_path, "held", ranks=1)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["world_size"] == 1


@pytest.mark.parametrize(("how", "status", "words"), [("fails", 1, "MemoryError: planted"), ("exits", 3, "")])
def test_a_program_that_fails_ends_at_once_with_its_reason(how, status, words, tmp_path):
    ended = torchrun(tmp_path, how, ranks=2)
    assert ended.returncode == 1
    assert words in ended.stderr and f"exitcode  : {status} " in ended.stderr and "SIGABRT" not in ended.stderr
