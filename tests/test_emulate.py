"""Emulated hosts behind a slow link, and memory that is short: both are real, and nothing of them is left afterwards."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial

import cloudpickle
import psutil
import pytest
import torch
from refusals import assert_refused

from course_lib.collectives.links import Link, ring_seconds
from course_lib.launch import launch
from course_lib.launch.emulation import (
    CannotEmulate,
    emulated_hosts,
    emulated_model,
    emulated_step,
    memory_limit,
    namespaces,
    slow_link,
    through_the_link,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SLOW = Link("50 Mbit/s", 0, 6.25e6)
WIRE = 0.8  # of the time at the link's rate: a bucket of 64 KiB at each end of the cable passes at once


@pytest.fixture(scope="module")
def possible():
    try:
        namespaces.Namespaces(1, 1e6).close()
    except CannotEmulate as error:
        pytest.skip(f"no network namespaces here: {error}")


def interfaces() -> str:
    return subprocess.run(
        "ip netns list && ip -brief link", shell=True, capture_output=True, text=True, check=True
    ).stdout


def look_around() -> tuple[str, tuple[str, ...], list[float], float, float]:
    """Where this rank is, the sum over all, seconds of that all-reduce, and of ranks 2 and 4 sending to rank 0 at once."""
    import torch.distributed as dist

    rank = dist.get_rank()
    whole, piece = torch.full((2**17,), rank + 1.0), torch.zeros(2**16)

    def timed(work) -> float:
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - began

    def to_rank_0() -> None:
        if rank in (2, 4):
            dist.send(piece, 0)
        elif rank == 0:
            for work in [dist.irecv(torch.zeros(2**16), source) for source in (2, 4)]:
                work.wait()

    seconds = timed(lambda: dist.all_reduce(whole)), timed(to_rank_0)
    variables = tuple(os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    return os.readlink("/proc/thread-self/ns/net"), variables, whole.unique().tolist(), *seconds


@pytest.mark.system
def test_each_host_has_a_network_of_its_own_and_packets_take_the_time_of_the_link(possible, no_leftovers):
    before = interfaces()
    with emulated_hosts(3, ranks_per_host=2, link=SLOW) as machines:
        run = machines.launch(look_around, threads=1, quiet=True)
        assert interfaces() == before  # nothing outside the namespaces
    spaces, variables, sums, all_reduce, to_one = zip(*run.results, strict=True)
    assert spaces[0::2] == spaces[1::2] and len({os.readlink("/proc/self/ns/net"), *spaces}) == 4
    assert list(variables) == [(str(rank % 2), "2", str(rank // 2)) for rank in range(6)]
    assert list(sums) == [[21.0]] * 6
    assert all_reduce[0] > WIRE * 2 * 2 / 3 * 2**19 / 6.25e6  # 0.09 s
    assert to_one[0] > WIRE * 2 * 2**18 / 6.25e6  # the receiver's cable is the bottleneck, not the senders'
    assert "50 Mbit/s" in run.stamp["emulated"] and "Emulated" in run.stamp["summary"]


PROGRAM = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from course_lib.launch.emulation import emulated_hosts
with emulated_hosts(2) as machines:
    print(machines.how, flush=True)
    time.sleep(1000)
"""


@pytest.mark.system
def test_a_notebook_that_is_killed_or_interrupted_leaves_no_namespace(possible):
    before = interfaces()
    for number in (signal.SIGINT, signal.SIGKILL):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert program.stdout.readline() == "namespaces\n"
        holders = psutil.Process(program.pid).children(recursive=True)
        assert len(holders) == 3, number  # of the switch and two hosts
        program.send_signal(number)
        program.wait(60)
        program.stdout.close()
        assert psutil.wait_procs(holders, timeout=60)[1] == [], number
        assert interfaces() == before, number


def test_where_the_system_refuses_it_says_why_and_delays(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for expected in ("missing", "not permitted"):
        with emulated_hosts(2, link=SLOW) as machines:
            assert machines.how == "delay" and expected in machines.why and machines.why in str(machines)
        for tool in ("unshare", "nsenter", "ip", "tc"):
            (tmp_path / tool).write_text("#!/bin/sh\necho 'not permitted' >&2\nexit 1\n")
            (tmp_path / tool).chmod(0o755)


def one_all_reduce():
    import torch.distributed as dist

    total, began = torch.full((2**14,), dist.get_rank() + 1.0), time.perf_counter()
    dist.all_reduce(total)
    return time.perf_counter() - began, total.unique().tolist()


def test_without_namespaces_all_reduces_are_held_back(no_leftovers, monkeypatch):
    monkeypatch.setattr(namespaces, "_TOOLS", ("no such tool",))
    with emulated_hosts(2, link=Link("slow", 0.05, 1e6)) as machines:
        for took, total in machines.launch(one_all_reduce, quiet=True).results:
            assert total == [3.0] and took > 2 * 0.05 + 2**16 / 1e6


# ------------------------------------------------------------------------------------------- a step of emulated GPUs
# Times are held from below only, and to their order: how much longer things take, the rest of the machine decides.
PARAMETERS = 16 * [256 * 256 * 4, 256 * 4]  # bytes of each of the emulated model's tensors
SLOW_STEP = Link("slow", 0, 2e7)
FLOAT = 1e-6  # seconds that a sum of times may be short of


def by_hand(model, async_op=False):
    """Average after backward, one message for each tensor."""
    import torch.distributed as dist

    def average():
        gradients = [parameter.grad for parameter in model.parameters()]
        under_way = [dist.all_reduce(gradient, async_op=async_op) for gradient in gradients]
        for gradient, work in zip(gradients, under_way, strict=True):
            if async_op:
                work.wait()
            gradient /= dist.get_world_size()

    return model, average


asynchronously = partial(by_hand, async_op=True)


def with_ddp(model):
    from torch.nn.parallel import DistributedDataParallel

    return through_the_link(DistributedDataParallel(model, bucket_cap_mb=1)), lambda: None


def stretches(spans, kind: str) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in spans if span.kind == kind]


def one_after_the_other(messages: list[tuple[float, float]]) -> bool:
    return all(start >= end - FLOAT for (_, end), (start, _) in zip(messages, messages[1:], strict=False))


def test_a_step_averaged_by_hand_computes_and_then_sends_one_message_after_the_other(no_leftovers):
    compute, link = 0.1, Link("slow", 1e-3, 1e8)
    wire = [ring_seconds("all_reduce", 2, num_bytes, link) for num_bytes in PARAMETERS]  # 0.106 s together
    for wrap in (by_hand, asynchronously):
        seconds, spans = emulated_step(wrap, ranks=2, compute=compute, link=link, steps=2)
        [(began, turn)], [(turned, done)] = stretches(spans, "forward"), stretches(spans, "backward")
        assert began == 0 and turn == turned, wrap
        assert turn >= compute / 3 - FLOAT and done - turned >= compute * 2 / 3 - FLOAT, wrap
        messages = stretches(spans, "collective")
        assert [end - start for start, end in messages] == pytest.approx(wire, abs=FLOAT), wrap
        assert one_after_the_other(messages) and messages[0][0] >= done - FLOAT, wrap
        assert seconds >= messages[-1][1] - FLOAT, wrap
        assert seconds >= compute + sum(wire) - FLOAT, wrap


def messages_at_the_first_layer() -> tuple[int, list[tuple[float, float]]]:
    """How many buckets had left when the second backward reached the first layer, and when each was on the wire."""
    seen = []
    with slow_link(SLOW_STEP) as wire:
        model = emulated_model(1e-3)
        model[0].register_full_backward_pre_hook(lambda *_: seen.append(len(wire.messages)))
        ddp, _ = with_ddp(model)
        for _ in range(2):
            wire.messages.clear()
            ddp(torch.ones(4, 256)).sum().backward()
    return seen[-1], wire.messages


def test_ddps_first_bucket_leaves_during_backward_and_each_byte_travels_once(no_leftovers):
    for before, messages in launch(messages_at_the_first_layer, ranks=2, backend="gloo", quiet=True).results:
        assert 0 < before < len(messages) and one_after_the_other(messages)
        together = sum(end - start for start, end in messages)
        assert together == pytest.approx(ring_seconds("all_reduce", 2, sum(PARAMETERS), SLOW_STEP), abs=FLOAT)


def gradients_on_both_links():
    """(wrap, its gradients without a link, over a slow one, and this rank's own) for each wrap; and what is left."""
    import torch.distributed as dist

    def gradients(wrap):
        torch.manual_seed(0)
        model, average = wrap(emulated_model(1e-3))
        torch.manual_seed(1 + dist.get_rank())
        model(torch.randn(4, 256)).square().sum().backward()
        average()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    send, result = dist.all_reduce, []
    for wrap in (by_hand, asynchronously, with_ddp):
        fast = gradients(wrap)
        with slow_link(Link("slow", 1e-4, 1e8)) as wire:
            slow = gradients(wrap)
        own = gradients(lambda model: (model, lambda: None))
        result.append((wrap, len(wire.messages), torch.equal(fast, slow), torch.equal(fast, own)))
    return result, dist.all_reduce is send


def test_a_slow_link_changes_no_gradient_and_is_gone_afterwards(no_leftovers):
    for rows, restored in launch(gradients_on_both_links, ranks=2, backend="gloo", threads=1, quiet=True).results:
        for name, messages, same, own in rows:
            assert messages > 0 and same and not own, name
        assert restored


# ---------------------------------------------------------------------------------------------------------------- memory
MIB = 2**20


def refuses(num_bytes: int, pieces: int = 1) -> bool:
    """Whether torch's allocator refuses one of so many tensors of so many bytes, all alive at once."""
    try:
        tensors = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(pieces)]
    except RuntimeError as error:
        assert "can't allocate memory" in str(error)
        return True
    del tensors
    return False


def in_a_rank() -> dict[str, bool]:
    holds: dict[str, bool] = {}
    # what the process has freed and kept must not be a way round the limit. glibc keeps up to twice the largest block
    # that was ever freed, so a block of 30 MiB makes it keep these 50 times 1 MiB
    torch.ones(30 * MIB, dtype=torch.uint8)
    low = [torch.ones(MIB, dtype=torch.uint8) for _ in range(50)]
    above = [bytearray(100_000) for _ in range(20)]  # alive above them on the heap: they cannot be given back
    del low
    with memory_limit.memory_limit(16 * MIB):
        holds["kept memory counts"] = refuses(MIB, pieces=60)
    del above
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory_limit.memory_limit(48 * MIB):
        holds["what fits is given, again and again"] = not refuses(40 * MIB) and not refuses(40 * MIB)
        holds["too much is refused"] = refuses(56 * MIB)
    holds["afterwards"] = not refuses(200 * MIB)
    holds["the old limit"] = resource.getrlimit(resource.RLIMIT_DATA) == before
    return holds


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_the_allocator_refuses_what_is_beyond_the_limit_and_nothing_else():
    for holds in launch(in_a_rank, ranks=2, quiet=True).results:
        assert not [name for name, good in holds.items() if not good]


# ------------------------------------------------------------------------------------------------------------- bad input
def test_bad_input_is_refused_before_any_rank_starts(monkeypatch):
    def limit(num_bytes, device=None):
        memory_limit.memory_limit(num_bytes, device=device).__enter__()

    with emulated_hosts(2) as machines:
        assert_refused(
            [
                (lambda: emulated_hosts(0).__enter__(), ValueError, "hosts=0"),
                (lambda: emulated_hosts(2, link="ethernet").__enter__(), ValueError, "'ethernet-"),  # did you mean
                (lambda: machines.launch(one_all_reduce, ranks=3), TypeError, "ranks"),
                (lambda: machines.launch(one_all_reduce, 1), TypeError, "positional"),
                (lambda: through_the_link(3), ValueError, "DistributedDataParallel"),
                (lambda: limit(0), ValueError, "num_bytes=0"),
                (lambda: limit("1 GB"), ValueError, "'1 GB'"),
                (lambda: limit(MIB, "tpu"), ValueError, "'tpu'"),
            ]
        )
    monkeypatch.setattr(memory_limit.sys, "platform", "darwin")
    assert_refused([(lambda: limit(MIB, "cpu"), CannotEmulate, "darwin")])
