"""Collectives, bytes on the wire and step times as observed, against arithmetic and the system's counters."""

from __future__ import annotations

import sys
import threading
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch
from course_lib.observe import WireMeter, observe, record_collectives

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")


def tiny_llama(tied: bool = False) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False, tie_word_embeddings=tied))


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


def test_every_collective_is_seen_with_its_bytes():
    run = launch(every_kind, ranks=3)
    everybody = (0, 1, 2)
    for rank in everybody:
        seen = [(c.kind, c.bytes, c.group) for c in run.collectives if c.rank == rank]
        assert seen == [
            ("all_reduce", 24, everybody),
            ("broadcast", 24, everybody),
            ("barrier", 0, everybody),
            *([("send", 24, everybody)] if rank == 0 else [("recv", 24, everybody)] if rank == 1 else []),
            *([("all_reduce", 8, (0, 2))] if rank != 1 else []),
            ("all_reduce", 24, everybody),
            ("all_gather", 24, everybody),
            ("all_gather", 24, everybody),
            ("reduce_scatter", 72, everybody),
            ("reduce", 24, everybody),
            ("gather", 24, everybody),
            ("scatter", 72 if rank == 0 else 0, everybody),
            ("all_to_all", 72, everybody),
            ("all_reduce", 48, everybody),
            ("all_reduce", 20, everybody),
        ]
        own = [c for c in run.collectives if c.rank == rank]
        assert all(c.seconds > 0 for c in own if c.kind not in ("send", "recv"))
        assert all(a.start < b.start for a, b in zip(own, own[1:], strict=False))


def issue_from_threads() -> list[tuple[str, int, int | None]]:
    """All-reduce in a thread, and on a backend of one's own, which PyTorch's dispatcher never sees."""

    def in_a_thread() -> None:
        dist.all_reduce(torch.ones(10))
        if rank == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(3), 0)
        private.allreduce([torch.ones(20)]).wait()

    rank = dist.get_rank()
    store = dist.PrefixStore("private", dist.distributed_c10d._get_default_store())
    private = dist.ProcessGroupGloo(store, rank, dist.get_world_size())
    with record_collectives() as issued:
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        private._reduce_scatter_base(torch.empty(4), torch.ones(8)).wait()
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce(tensors=[torch.ones(30)]).wait()
    dist.barrier()
    return [(c.kind, c.bytes, c.peer) for c in issued]


def test_collectives_of_every_thread_and_of_private_backends_are_seen_with_their_bytes():
    run = launch(issue_from_threads, ranks=2)
    for rank in (0, 1):
        expected = [
            ("all_reduce", 40, None),
            ("send", 12, 1) if rank == 0 else ("recv", 12, 0),
            ("all_reduce", 80, None),
            ("reduce_scatter", 32, None),
            ("all_reduce", 120, None),
        ]
        assert run.results[rank] == expected
        own = [c for c in run.collectives if c.rank == rank]
        assert [(c.kind, c.bytes, c.peer) for c in own] == [*expected, ("barrier", 0, None)]
        assert all(c.seconds > 0 and c.group == (0, 1) for c in own if c.peer is None)


def test_collectives_are_recorded_where_no_launch_does_it():
    """Under torchrun a program records its own; outside the block nothing is recorded and nothing stays replaced."""
    method = torch._C._distributed_c10d.Backend.allreduce
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            with record_collectives() as issued:
                dist.all_reduce(torch.ones(5))
            dist.all_reduce(torch.ones(6))
            assert [(c.kind, c.bytes) for c in issued] == [("all_reduce", 20)]
    finally:
        dist.destroy_process_group()
    assert torch._C._distributed_c10d.Backend.allreduce is method


def test_seconds_include_the_wait_for_a_late_rank():
    def late():
        dist.barrier()
        time.sleep(1.0 * dist.get_rank())
        dist.all_reduce(torch.ones(4))

    waited, _ = [c for c in launch(late, ranks=2).collectives if c.kind == "all_reduce"]
    assert waited.rank == 0 and waited.seconds > 0.5


def scatter_many():
    """MiB that eight reduce_scatters of 40 MB leave behind, Python's collector of circles switched off."""
    import gc

    import psutil

    gc.disable()
    before = psutil.Process().memory_info().rss
    for _ in range(8):
        part = torch.empty(10_000_000 // dist.get_world_size())
        dist.reduce_scatter_tensor(part, torch.ones(10_000_000), async_op=True).wait()
    return (psutil.Process().memory_info().rss - before) / 2**20


def test_a_noted_collective_keeps_no_tensor_alive():
    run = launch(scatter_many, ranks=2, quiet=True)
    assert max(run.results) < 250  # the inputs alone are 305 MiB; gloo by itself is left with about 120
    assert all(c.seconds for c in run.collectives)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_on_the_wire(ranks):
    """gloo's all_reduce of 4 MiB sends the ring's 2(n-1)/n, and 48 bytes a message: at most 0.1 % more."""

    def sends():
        value, rank = torch.ones(2**20), dist.get_rank()
        with WireMeter() as ring:
            dist.all_reduce(value)
        with WireMeter() as one_way:
            dist.send(value, 1) if rank == 0 else dist.recv(value, 0) if rank == 1 else None
        dist.barrier()  # a rank that leaves closes its connections, and what they carried could not be read any more
        return ring.bytes, one_way.bytes

    run = launch(sends, ranks=ranks)
    formula = 2 * (ranks - 1) / ranks * 2**22
    assert all(formula <= ring <= 1.001 * formula for ring, _ in run.results), run.results
    one_way = [sent for _, sent in run.results]  # what a rank receives is not counted
    assert 2**22 <= one_way[0] <= 1.001 * 2**22 and max(one_way[1:]) < 1000, run.results
    between = [whole - ring - sent for whole, (ring, sent) in zip(run.wire_bytes, run.results, strict=True)]
    assert all(0 <= rest < 1000 for rest in between), between  # messages that announce the next call
    assert {c.wire_bytes for c in run.collectives if c.kind == "all_reduce"} == {formula}


# ------------------------------------------------------------------------------------------------- steps, and the cost
def test_step_times_and_tokens():
    observation = observe()
    for pause in (2.0, 0.05, 0.05, 0.05):
        with observation.step(tokens=100):
            time.sleep(pause)
    assert observation.num_steps == 4 and 0.05 <= observation.median_step < 1.0 and observation.memory == {}
    assert observation.tokens_per_second == pytest.approx(100 / observation.median_step)
    outcome = observation.outcome([3.5], "Plain", saved=True)
    assert (outcome.losses, outcome.wrapper, outcome.rank, outcome.world_size) == ([3.5], "Plain", 0, 1)
    assert outcome.median_step == observation.median_step and outcome.extra == {"saved": True}
    assert outcome.wire_bytes is None  # without a process group the sockets are somebody else's
    assert observe().outcome([], "Plain").median_step == 0.0  # nothing was timed
    with pytest.raises(ValueError, match="measured_step=-1: give the index"):
        observe(measured_step=-1)
