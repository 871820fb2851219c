"""Emulated hosts: ranks that cannot reach each other but over a slow link, and nothing left of them afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import cloudpickle
import psutil
import pytest

from course_lib.collectives.links import Link
from course_lib.launch import RankFailed
from course_lib.launch.emulation import CannotEmulate, delay, emulated_hosts, namespaces, through_the_link
from course_lib.training.data_parallel.scaling import expected_step, scaling

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SLOW = Link("50 Mbit/s", 0, 6.25e6)
WIRE = 0.8  # of the time at the link's rate: a bucket of 64 KiB at each end of the cable passes at once


@pytest.fixture(scope="module")
def possible():
    try:
        namespaces.Namespaces(1, 1e6).close()
    except CannotEmulate as error:
        pytest.skip(f"no network namespaces here: {error}")


def holders() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["cat"]]


def gone(pids, seconds=60.0):
    """The pids that are still there after a while."""
    give_up = time.monotonic() + seconds
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < give_up:
        time.sleep(0.02)
    return left


def interfaces() -> str:
    named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return named + subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout


# ------------------------------------------------------------------------------------------------ namespaces
def who_am_i():
    import torch
    import torch.distributed as dist

    x = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    own = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")}
    return os.readlink("/proc/thread-self/ns/net"), own, x.tolist()


def test_each_host_has_a_network_of_its_own(possible, no_leftovers):
    before = interfaces()
    with emulated_hosts(2, ranks_per_host=2, link=SLOW) as machines:
        pids = holders()
        assert len(pids) >= 3 and "2 hosts of 2 ranks in network namespaces" in str(machines)
        run = machines.launch(who_am_i, quiet=True)
        assert interfaces() == before  # nothing outside the namespaces
    spaces = [result[0] for result in run.results]
    here = os.readlink("/proc/self/ns/net")
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3] and here not in spaces
    assert [tuple(result[1].values()) for result in run.results] == [
        ("0", "2", "0"),
        ("1", "2", "0"),
        ("0", "2", "1"),
        ("1", "2", "1"),
    ]
    assert all(result[2] == [10.0] * 3 for result in run.results)
    assert [c.kind for c in run.collectives if c.rank == 3] == ["all_reduce"]
    assert "Emulated" in run.stamp["summary"] and "50 Mbit/s" in run.stamp["emulated"]


def speeds():
    """Seconds of an all-reduce of 0.5 MiB, and of two ranks sending 0.25 MiB each to rank 0 at the same time; and the
    bytes that this rank's host has sent to others."""
    import torch
    import torch.distributed as dist

    def timed(work):
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - began

    whole, piece = torch.zeros(2**17), torch.zeros(2**16)

    def to_rank_0():
        if dist.get_rank():
            dist.send(piece, 0)
        else:
            for work in [dist.irecv(torch.zeros(2**16), source) for source in (1, 2)]:
                work.wait()

    seconds = timed(lambda: dist.all_reduce(whole)), timed(to_rank_0)
    with open("/proc/thread-self/net/dev") as counters:
        lines = [line.split(":") for line in counters if ":" in line]
    return *seconds, sum(int(numbers.split()[8]) for name, numbers in lines if name.strip() != "lo")


def test_packets_take_the_time_of_the_link_both_ways(possible, no_leftovers):
    with emulated_hosts(3, link=SLOW) as machines:
        ring, server, sent = machines.launch(speeds, quiet=True).results[1]
    assert sent > 2 * 2 / 3 * 2**19 + 2**18
    assert ring > WIRE * 2 * 2 / 3 * 2**19 / 6.25e6  # 0.11 s
    assert server > WIRE * 2 * 2**18 / 6.25e6  # 0.08 s: the receiver's cable is the bottleneck, not the senders'


def test_ranks_of_one_host_talk_past_the_link(possible, no_leftovers):
    with emulated_hosts(1, ranks_per_host=3, link=Link("1 Mbit/s", 0, 1.25e5)) as machines:
        assert machines.launch(speeds, quiet=True).results[0][2] < 2**18


def test_an_exception_leaves_nothing(possible, no_leftovers):
    def fails():
        raise ZeroDivisionError("on purpose")

    with pytest.raises(RankFailed, match="on purpose"), emulated_hosts(2) as machines:
        pids = holders()
        machines.launch(fails, quiet=True)
    assert pids and not gone(pids)


def test_ctrl_c_leaves_nothing(possible, no_leftovers, tmp_path):
    def waits(path):
        with open(path, "w"):
            time.sleep(100)

    def press():
        while not (tmp_path / "there").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt), emulated_hosts(2) as machines:
        pids = holders()
        finger.start()
        machines.launch(waits, str(tmp_path / "there"), quiet=True)
    finger.join()
    assert pids and not gone(pids)


PROGRAM = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from course_lib.launch.emulation import emulated_hosts
with emulated_hosts(2) as machines:
    print(*[path.split("/")[2] for path in machines.paths], flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_notebook_that_is_killed_leaves_nothing(possible, number):
    before = interfaces()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = list(map(int, program.stdout.readline().split()))
    family = [program.pid, *(p.pid for p in psutil.Process(program.pid).children(recursive=True))]
    assert len(pids) == 2 and set(pids) < set(family) and len(family) == 4
    program.send_signal(number)
    program.wait(60)
    program.stdout.close()
    assert not gone(family) and interfaces() == before


# -------------------------------------------------------------------------------------------- the way without
def test_without_the_tools_it_says_why_and_delays(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with emulated_hosts(2, link=SLOW) as machines:
        assert machines.how == "delay" and "missing: unshare, nsenter, ip, tc" in machines.why
        assert machines.why in str(machines) and "holding DDP's gradients back" in str(machines)
    with pytest.raises(CannotEmulate, match="missing: unshare"), emulated_hosts(2, how="namespaces"):
        pass


def test_a_refusal_of_the_system_is_passed_on(possible, monkeypatch, tmp_path):
    for tool, said in (("unshare", "not permitted"), ("tc", "no tbf here")):
        fake = tmp_path / tool
        fake.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
        fake.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
            before = set(holders())
            with emulated_hosts(2, link=SLOW) as machines:
                assert machines.how == "delay" and said in machines.why
            assert not gone(set(holders()) - before)
        fake.unlink()


def test_the_wire_carries_one_bucket_at_a_time(monkeypatch):
    now = 7.0
    monkeypatch.setattr(delay, "time", SimpleNamespace(perf_counter=lambda: now))
    wire = delay._Wire(SLOW)
    assert [wire.arrival(2, 625_000) for _ in range(3)] == pytest.approx([7.1, 7.2, 7.3])
    now = 8.0
    assert wire.arrival(2, 625_000) == pytest.approx(8.1)  # it was free meanwhile


def one_backward():
    """Seconds of a backward pass, and the gradient of the mean over ranks of (rank + 1) * w."""
    import torch
    import torch.distributed as dist

    model = through_the_link(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2**14, 1, bias=False)))
    loss = model(torch.full((1, 2**14), dist.get_rank() + 1.0)).sum()
    dist.barrier()
    began = time.perf_counter()
    loss.backward()
    return time.perf_counter() - began, model.module.weight.grad.unique().tolist()


def test_held_back_gradients_are_the_mean_that_ddp_computes(no_leftovers):
    """(Adam hardly asks for the scale of a gradient, so equal losses would not tell.)"""
    with emulated_hosts(2, link=Link("slow", 0.05, 1e6), how="delay") as machines:
        for took, gradient in machines.launch(one_backward, quiet=True).results:
            assert gradient == [1.5] and took > 2 * 0.05 + 2**16 / 1e6


def test_only_ddp_can_be_delayed():
    with pytest.raises(ValueError, match="int has no buckets to delay: wrap it in DistributedDataParallel"):
        through_the_link(3)


# ------------------------------------------------------------------------------------------------- scaling
SMALL = dict(steps=3, compute_seconds=0.05)


@pytest.mark.parametrize("how", ["delay", "namespaces"])
def test_the_link_slows_training_down_and_changes_no_loss(how, request, no_leftovers):
    if how == "namespaces":
        request.getfixturevalue("possible")
    link = Link("100 Mbit/s", 0, 12.5e6)
    fast, slow = (scaling(3, which, how=how, **SMALL) for which in (None, link))
    assert slow.gradient_bytes == 4 * 803_968
    assert slow.losses == pytest.approx(fast.losses, rel=1e-6)
    # At least 0.27 s, on any machine. How much faster the others are, the rest of the machine decides.
    assert slow.step_seconds > WIRE * 4 / 3 * slow.gradient_bytes / link.bandwidth
    assert slow.tokens_per_second == pytest.approx(3 * 32 / slow.step_seconds)
    assert "Emulated: 3 hosts" in slow.emulation and "50 ms of sleep a micro-batch" in slow.emulation
    adapters = scaling(3, link, adapters=True, how=how, **SMALL)
    assert adapters.gradient_bytes == 74_752


def test_computing_is_at_least_what_was_asked_for(no_leftovers):
    alone = scaling(1, None, how="delay", steps=3, compute_seconds=0.2)
    assert alone.step_seconds > 0.2 and "1 host of 1 rank" in alone.emulation


def test_the_expected_step_hides_what_fits_under_backward():
    free = Link("free", 0, 1e6)
    same = dict(gradient_bytes=10**6, compute_seconds=4.0)
    assert expected_step(1, free, **same) == 4.0
    assert expected_step(2, free, **same) == pytest.approx(4 + 1 / 4)  # 1 s of wire: only the last layer's shows
    assert expected_step(2, Link("slower", 0, 1e5), **same) == pytest.approx(4 + 10 - 2)  # 10 s, of which 2 hide
    assert expected_step(2, free, gradient_accumulation_steps=3, **same) == pytest.approx(12.25)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: emulated_hosts(0).__enter__(), "hosts=0: give a whole number from 1 to 250."),
        (lambda: emulated_hosts(2, 0).__enter__(), "ranks_per_host=0"),
        (lambda: emulated_hosts(2, link="ethernet").__enter__(), "did you mean 'ethernet-"),
        (lambda: emulated_hosts(2, how="magic").__enter__(), "how='magic' is no choice"),
        (lambda: scaling(2, None, steps=2), "steps=2: the first two are warm-up"),
        (lambda: scaling(2, None, compute_seconds=0), "compute_seconds=0"),
    ],
)
def test_bad_input_is_a_sentence(call, said):
    with pytest.raises(ValueError) as error:
        call()
    assert said in str(error.value)


def test_a_wrong_call_is_told_before_any_rank_starts():
    with emulated_hosts(2, how="delay") as machines:
        with pytest.raises(ValueError, match="ranks: the hosts decide that"):
            machines.launch(who_am_i, ranks=3)
        with pytest.raises(TypeError, match="too many positional"):
            machines.launch(who_am_i, 1)
