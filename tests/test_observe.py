"""Collectives, bytes on the wire, steps and spans as observed, against arithmetic and the system's counters."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from refusals import assert_refused

from course_lib.launch import launch
from course_lib.observe import Span, WireMeter, collectives, observe, record_collectives, steps, trace_step
from course_lib.observe.collectives import Collective, Pulse, Reading, Recorder
from course_lib.training.outcome import outcome

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")


# ------------------------------------------------------------------------------------------------------- collectives
def every_kind() -> None:
    import torch.distributed._functional_collectives as functional

    rank, n = dist.get_rank(), dist.get_world_size()
    x, whole = torch.ones(6), torch.ones(6 * n)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.barrier()
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None
    pair = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(x[:2], group=pair)
    functional.all_reduce(x, "sum", dist.group.WORLD).sum().item()
    sum(t.sum() for t in functional.all_reduce_coalesced([torch.ones(2, 3), torch.ones(5)], "sum", dist.group.WORLD))
    dist.all_gather_into_tensor(whole, x)
    dist.all_gather([torch.empty(6) for _ in range(n)], x)
    dist.reduce_scatter_tensor(x, whole)
    dist.reduce(x, 0)
    dist.gather(x, [torch.empty(6) for _ in range(n)] if rank == 0 else None)
    dist.scatter(x, [torch.empty(6) for _ in range(n)] if rank == 0 else None)
    dist.all_to_all_single(torch.empty_like(whole), whole)
    work = dist.all_reduce(x.double(), async_op=True)
    work.wait()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(5))
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(10),))
    thread.start()
    thread.join()
    dist.barrier()
    time.sleep(1.0 if rank == 2 else 0.0)
    dist.all_reduce(torch.ones(30))


def test_every_collective_is_seen_with_its_bytes_and_the_wait_for_a_late_rank():
    run = launch(every_kind, ranks=3)
    everybody = (0, 1, 2)
    for rank in everybody:
        local = [c for c in run.collectives if c.rank == rank]
        assert [(c.kind, c.bytes, c.group) for c in local] == [
            ("all_reduce", 24, everybody),
            ("broadcast", 24, everybody),
            ("barrier", 0, everybody),
            *([("send", 24, everybody)] if rank == 0 else [("recv", 24, everybody)] if rank == 1 else []),
            *([("all_reduce", 8, (0, 2))] if rank != 1 else []),
            ("all_reduce", 24, everybody),
            ("all_reduce", 44, everybody),
            ("all_gather", 24, everybody),
            ("all_gather", 24, everybody),
            ("reduce_scatter", 72, everybody),
            ("reduce", 24, everybody),
            ("gather", 24, everybody),
            ("scatter", 72 if rank == 0 else 0, everybody),
            ("all_to_all", 72, everybody),
            ("all_reduce", 48, everybody),
            ("all_reduce", 20, everybody),
            ("all_reduce", 40, everybody),
            ("barrier", 0, everybody),
            ("all_reduce", 120, everybody),
        ], f"rank {rank}"
        told = [c for c in local if c.kind not in collectives.UNTOLD]
        assert all(c.seconds > (0.5 if c.bytes == 120 and rank != 2 else 0) for c in told)
        assert [c.peer for c in local if c.kind in ("send", "recv")] == [1, 0][rank : rank + 1]
        assert all(a.start < b.start for a, b in itertools.pairwise(local))
        shapes = {(c.kind, c.bytes): c.shapes for c in local}
        assert shapes["all_reduce", 44] == ((2, 3), (5,)) and shapes["barrier", 0] == ()
        assert shapes["reduce_scatter", 72] == shapes["all_to_all", 72] == ((18,),)
        assert shapes["scatter", 72 if rank == 0 else 0] == (((6,),) * 3 if rank == 0 else ())


def test_collectives_are_recorded_where_no_launch_does_it():
    """Under torchrun a program records its own; outside the block nothing is recorded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def shapes(issued):
        assert {c.kind for c in issued} == {"all_reduce"}
        return [c.shapes[0] for c in issued]

    try:
        for _ in range(2):
            with record_collectives() as issued:
                dist.all_reduce(torch.ones(5))
            dist.all_reduce(torch.ones(6))
            assert shapes(issued) == [(5,)]
        with pytest.raises(ZeroDivisionError), record_collectives() as outer:
            dist.all_reduce(torch.ones(1))
            with pytest.raises(RuntimeError, match="scalar type"), record_collectives() as inner:
                dist.all_reduce(torch.ones(2))
                dist.all_reduce(torch.ones(3, dtype=torch.int16))  # gloo refuses it
            dist.all_reduce(torch.ones(4))
            assert shapes(inner) == [(2,), (3,)] and 1 / 0
        assert shapes(outer) == [(1,), (2,), (3,), (4,)]
        first, second = record_collectives(), record_collectives()  # of two threads, say
        ended, issued = first.__enter__(), second.__enter__()
        first.__exit__(None, None, None)
        dist.all_reduce(torch.ones(7))
        second.__exit__(None, None, None)
        assert shapes(issued) == [(7,)] and ended == []
        dist.all_reduce(torch.ones(8))
        assert len(outer) == 4 and len(issued) == 1
    finally:
        dist.destroy_process_group()


def test_a_pulse_tells_the_last_call_in_a_few_bytes(tmp_path):
    pulse = Pulse(str(tmp_path / "pulse"))
    assert Pulse.read(str(tmp_path / "pulse")) == Reading()
    for shapes, text in ((((2, 3), ()), "(2, 3), ()"), (((1024, 4096),) * 99, "(1024, 4096), " * 4 + "(1024…")):
        pulse.begin(5, 3, Collective(0, "all_reduce", 24, None, 0.0, (0, 1), shapes=shapes), 7, 2, True)
        pulse.end(4)
        told = Pulse.read(str(tmp_path / "pulse"))
        assert told == Reading(5, 4, 24, group=7, number=2, same_size=True, kind="all_reduce", shapes=text)


def test_on_a_gpu_a_collective_ends_when_its_event_has_come(tmp_path, monkeypatch):
    """NCCL returns no work for a call that is not async, and everything at once; here the events are made up."""
    recorder, reached = Recorder(Pulse(str(tmp_path / "pulse"))), []

    def event(at):
        return SimpleNamespace(query=lambda: at in reached, elapsed_time=lambda end: 1000.0 * (end.at - at), at=at)

    for at in (1, 2):
        recorder.log.append(Collective(0, "all_reduce", 24, None, 0.0, (0, 1)))
        monkeypatch.setattr(collectives, "_gpu_event", lambda at=at: event(at + 0.5))
        recorder._note_end(recorder.log[-1], None, event(at))
    for reached[:], ended in (([], 0), ([1.5], 1), ([1.5, 2.5], 2)):
        recorder._count_ended()
        assert [c.seconds for c in recorder.log] == [0.5] * ended + [None] * (2 - ended)
        assert Pulse.read(str(tmp_path / "pulse")).ended == ended


def send_and_reduce() -> tuple[int, int]:
    value, rank = torch.ones(2**20), dist.get_rank()
    with WireMeter() as ring:
        dist.all_reduce(value)
    with WireMeter() as one_way:
        dist.send(value, 1) if rank == 0 else dist.recv(value, 0) if rank == 1 else None
    dist.barrier()  # a rank that leaves closes its connections, and what they carried could not be read any more
    return ring.bytes, one_way.bytes


def test_bytes_on_the_wire():
    """gloo's all_reduce of 4 MiB sends the ring's 2(n-1)/n, and 48 bytes a message: at most 0.1 % more."""
    run = launch(send_and_reduce, ranks=3)
    formula = 2 * 2 / 3 * 2**22
    assert all(formula <= ring <= 1.001 * formula for ring, _ in run.results), run.results
    one_way = [sent for _, sent in run.results]  # what a rank receives is not counted
    assert 2**22 <= one_way[0] <= 1.001 * 2**22 and max(one_way[1:]) < 1000, run.results
    between = [whole - ring - sent for whole, (ring, sent) in zip(run.wire_bytes, run.results, strict=True)]
    assert all(0 <= rest < 1000 for rest in between), between  # messages that announce the next call
    assert {c.wire_bytes for c in run.collectives if c.kind == "all_reduce"} == {formula}


# ------------------------------------------------------------------------------------------------------------- steps
def test_step_times_and_tokens(monkeypatch):
    seconds = iter([0.0, 2.0, 10.0, 10.5, 20.0, 20.5, 30.0, 30.5])  # a first step of 2 s, then three of half a second
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    observation = observe()
    for _ in range(4):
        with observation.step(tokens=100):
            pass
    told = outcome(observation, [3.5], "Plain", saved=True)
    assert (told.losses, told.wrapper, told.rank, told.world_size) == ([3.5], "Plain", 0, 1)
    assert (told.median_step, told.tokens_per_second, told.extra) == (0.5, 200.0, {"saved": True})
    assert told.memory == {} and told.wire_bytes is None  # alone, its sockets are somebody else's
    assert outcome(observe(), [], "Plain").median_step == 0.0  # nothing was timed
    assert_refused([(lambda: observe(measured_step=-1), ValueError, "measured_step=-1")])


def test_a_step_that_raises_leaves_nothing_behind_and_two_are_not_measured_at_once():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(observation, *, fails=False):
        with observation.step(tokens=8):
            model(torch.ones(4, 16)).sum().backward()
            if fails:
                raise ZeroDivisionError
            optimizer.step()

    def hooked():
        return (
            [len(module._forward_pre_hooks) for module in model.modules()],
            len(optimizer._optimizer_step_pre_hooks),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
            torch.autograd._profiler_enabled(),
            (torch.distributed.Work.wait, torch.UntypedStorage.resize_, collectives._installed),
            torch.backends.mkldnn.enabled,
        )

    untouched = hooked()
    seen = observe(model, optimizer)
    for fails in (True, False, True, False, True, False):  # the measured one, index 1, fails once
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            train(seen, fails=fails)
        assert hooked() == untouched
    again = observe(model, optimizer, measured_step=0)
    train(again)
    assert seen.memory == again.memory and seen.memory["peak"] > seen.memory["parameters"] > 0
    assert seen.tokens == [8, 8] and len(seen.step_seconds) == 2 and seen.num_steps == 3

    inner, outer = observe(model, optimizer, measured_step=0), observe(model, optimizer, measured_step=0)
    with pytest.raises(RuntimeError, match="measure one step after the other"), outer.step():
        train(inner)
    assert hooked() == untouched and inner.memory == outer.memory == {}
    train(outer)
    assert outer.memory == again.memory
    with outer.step():  # not measured: the other one may be
        train(inner)
    assert inner.memory == again.memory and len(outer.step_seconds) == 1


# ------------------------------------------------------------------------------------------------------------- spans
def traced_ddp() -> tuple[float, list[Span], float]:
    from torch.nn.parallel import DistributedDataParallel

    from course_lib.models import tiny_llama

    model = DistributedDataParallel(tiny_llama(vocab=512), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros(4, 128, dtype=torch.long)

    def step():
        with torch.profiler.record_function("my label"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    dist.barrier()
    before = time.time()
    spans = trace_step(step)
    return before, spans, time.time()


def test_the_spans_of_a_ddp_step():
    run = launch(traced_ddp, ranks=2)
    for before, spans, after in run.results:
        assert all(before <= s.start <= s.end <= after for s in spans)  # seconds since the epoch
        assert [s.start for s in spans] == sorted(s.start for s in spans)
        by_kind = {kind: [s for s in spans if s.kind == kind] for kind in ("forward", "backward", "optimizer")}
        reduces = [s for s in spans if s.kind == "collective" and s.name == "gloo:all_reduce"]
        assert len(reduces) >= 3  # the gradients in buckets of 1 MiB
        assert len(by_kind["optimizer"]) == 1 and "AdamW" in by_kind["optimizer"][0].name
        assert "my label" in {s.name for s in spans if s.kind == "other"}
        (thread,) = {s.thread for kind in by_kind.values() for s in kind}
        assert thread not in {s.thread for s in spans if s.kind == "collective"}
        backward = by_kind["backward"]
        assert max(s.end for s in by_kind["forward"]) <= backward[0].start < reduces[0].start
        assert max(s.start for s in reduces) < by_kind["optimizer"][0].start
        computing = [s for s in spans if s.kind in by_kind]
        assert all(a.end <= b.start for a, b in itertools.pairwise(computing)), "one thread does one thing at a time"
        assert reduces[0].start < backward[-1].end, "the first bucket travels while the layers below it compute"
    (from_0, _, to_0), (from_1, _, to_1) = run.results
    assert max(from_0, from_1) < min(to_0, to_1), "both ranks on one clock"


def test_a_product_s_flops_are_those_that_pytorch_counts(monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr("course_lib.launch.rank_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(steps.time, "perf_counter", itertools.count().__next__)  # so each product takes a second
    with FlopCounterMode(display=False) as counter:
        assert steps.product_flops(size=8, repeats=3) == counter.get_total_flops() / 3
