"""Bytes of a step to the byte: by category, allocation by allocation, and which slices a rank holds."""

from __future__ import annotations

import sys
from collections import Counter

import cloudpickle
import torch
import torch.distributed as dist
from refusals import assert_refused

from benchmarks.observe import memory_seen
from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.observe import MemoryProbe, observe
from course_lib.observe.fake import LiveStorages, fake_ranks
from course_lib.observe.memory import memory_over_time, record_allocations

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
WEIGHTS = [64 * 128, 128, 128 * 32, 32]  # of mlp(), in numbers


# ------------------------------------------------------------------------------------------------------- by category
def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))


def train(model, *, optimizer=torch.optim.AdamW, measured_step=2) -> dict[str, int]:
    chosen = optimizer(model.parameters(), lr=1e-3)
    observation = observe(model, chosen, measured_step=measured_step)
    for _ in range(4):
        with observation.step(tokens=16):
            model(torch.ones(16, 64)).sum().backward()
            chosen.step()
            chosen.zero_grad()
    return observation.memory


def every_wrapper() -> dict[str, dict[str, int]]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    memory = {"plain": train(mlp()), "sgd": train(mlp(), optimizer=torch.optim.SGD)}
    for step in range(4):  # DDP rebuilds its buckets in one of them
        memory[f"ddp {step}"] = train(DistributedDataParallel(mlp()), measured_step=step)
    memory["view"] = train(DistributedDataParallel(mlp(), gradient_as_bucket_view=True))
    dist.barrier()
    memory["fsdp"] = train(fully_shard(mlp()))
    return memory


def test_bytes_by_category_and_collectives_of_ddp_and_fsdp():
    run = launch(every_wrapper, ranks=2)
    weights, counters = 4 * sum(WEIGHTS), 4 * len(WEIGHTS)  # bytes; AdamW's step counters are four bytes each
    # autograd keeps the first layer's input, and one tensor as the ReLU's result and the second layer's input
    kept = 16 * 64 * 4 + 16 * 128 * 4
    common = {"parameters": weights, "gradients": weights, "ddp_buckets": 0, "activations": kept}
    adam = {"optimizer_state": 2 * weights + counters}
    for memory in run.results:
        plain_peak = memory["plain"]["peak"]
        # weights, gradients, two moments, and AdamW's temporaries, which are two more where it works on all at once
        assert 4 * weights < plain_peak < 6 * weights
        for name, expected in (
            ("plain", common | adam),
            ("sgd", common | {"optimizer_state": 0}),
            *((f"ddp {step}", common | adam | {"ddp_buckets": weights}) for step in (2, 3)),
            ("view", common | adam),
            ("fsdp", {"parameters": weights // 2, "gradients": weights // 2, "optimizer_state": weights + counters}),
        ):
            assert memory[name].items() >= expected.items(), name
            assert memory[name]["peak"] > sum(expected.values()) - kept, name
        for step in range(4):
            # rebuilding sends the order of the buckets around, some bytes that may live a little longer
            assert plain_peak + weights <= memory[f"ddp {step}"]["peak"] < plain_peak + weights + 100, step
    assert run.memory[0].items() >= run.results[0]["fsdp"].items()  # the last measured step is the launch's own report

    for rank in (0, 1):
        local = [c for c in run.collectives if c.rank == rank]
        barrier = next(i for i, c in enumerate(local) if c.kind == "barrier")
        # five DDP models, four steps each
        assert sum(c.bytes for c in local[:barrier] if c.kind == "all_reduce") == 5 * 4 * weights
        sharded = Counter((c.kind, c.bytes) for c in local[barrier + 1 :] if c.kind != "broadcast")
        assert sharded == {("all_gather", weights // 2): 4, ("reduce_scatter", weights): 4}


def peak_of_pytorchs_tracker(model, optimizer, step) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
        tracker.reset_mod_stats()
        step()
    return next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]


def test_bytes_and_peak_of_a_llama_against_pytorchs_tracker():
    def prepared():
        model = tiny_llama(layers=2, tie_embeddings=True)  # the shared table counts once
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.zeros(4, 64, dtype=torch.long)

        def step():
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()  # after the forward pass: the last step's gradients lie beside its activations
            loss.backward()
            optimizer.step()

        return model, optimizer, step

    expected = peak_of_pytorchs_tracker(*prepared())
    model, optimizer, step = prepared()
    observation = observe(model, optimizer, measured_step=1)
    for _ in range(2):
        with observation.step():
            step()
    parameters = list(model.parameters())
    weights, counters = 4 * sum(p.numel() for p in parameters), 4 * len(parameters)
    memory = observation.memory
    assert 0 < memory["parameters"] - weights <= 128  # the rotary frequencies
    assert (memory["gradients"], memory["optimizer_state"]) == (weights, 2 * weights + counters)
    assert memory["peak"] == expected


def test_observers_in_each_other_see_the_same_step():
    model = mlp()
    probe = MemoryProbe(model)
    with LiveStorages() as outer, LiveStorages() as inner, probe.measure():
        model(torch.ones(16, 64)).sum().backward()
    assert probe.bytes["gradients"] == 4 * sum(WEIGHTS) and outer.highest == inner.highest > 0


# -------------------------------------------------------------------------------------------- allocation by allocation
def test_every_allocation_and_free_comes_in_order_and_older_tensors_are_seen_to_go():
    older = [torch.empty(300), torch.empty(100)]
    stranger = [torch.empty(77)]
    keep = []

    def fn():
        temporary = torch.empty(1000)
        keep.append(torch.empty(500, dtype=torch.float64))
        del temporary
        stranger.clear()
        older.pop(1)

    events = record_allocations(fn, [*older, older[0][:50]])  # a view is no second tensor
    assert [(e.allocate, e.id, e.bytes) for e in events] == [
        *[(True, 0, 1200), (True, 1, 400)],  # what was there before
        *[(True, 2, 4000), (True, 3, 4000), (False, 2, 4000), (False, 1, 400)],
    ]
    assert [now for _, now in memory_over_time(events)] == [1600, 5600, 9600, 5600, 5200]
    assert_refused([(lambda: record_allocations(fn, [torch.empty(3, device="meta")]), ValueError, "meta")])


# ---------------------------------------------------------------------------------------------------------- gloo's copies
def sharded_layer() -> dict[str, int]:
    """What each instrument sees of a step of FSDP2 on one matrix, on the ranks that are there."""
    from torch.distributed.fsdp import fully_shard

    layer, batch = fully_shard(torch.nn.Linear(1024, 1024, bias=False)), torch.ones(8, 1024)

    def step():
        layer(batch).square().mean().backward()
        layer.zero_grad()

    return memory_seen(layer, None, batch, step)


def test_a_peak_holds_what_a_gpu_would_hold_and_gloos_copies_stand_apart():
    """gloo copies what it scatters and what it gathers. The fake backend, as NCCL, copies nothing."""
    matrix = 4 * 1024 * 1024
    with fake_ranks(2):
        fake = sharded_layer()
    # a shard, its gradient, the gradient of the whole matrix and that once more, made flat; some scalars
    assert fake["counted"] == fake["probe"] == fake["profiler"] and 0 <= fake["probe"] - 3 * matrix < 100
    assert fake["gloo, counted"] == fake["gloo, probe"] == 0
    for real in launch(sharded_layer, ranks=2, quiet=True).results:
        assert real["counted"] == fake["counted"] and real["probe"] == fake["probe"]
        assert real["gloo, counted"] == matrix and 0 <= real["gloo, probe"] - matrix < 100  # and some words of its own
        # the profiler does not see what gloo's own threads are the last to let go of
        assert real["profiler"] >= real["probe"] + real["gloo, probe"]
