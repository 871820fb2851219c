"""`estimate` against execution on fake tensors: whole training steps at the shapes of Llama 3.1 8B and 70B.

What held the two apart until it was found out, so that nothing here had to be loosened:

- 6 % on the tiny model, between any counter on fake tensors and the truth on real ones. transformers reads the values of
  position ids to learn whether several texts share a row (`find_packed_sequence_indices`). Fake tensors have no values, so
  it plays safe: a (tokens x tokens) mask is written out, and with a mask the CPU's and CUDA's attention is given keys
  and values repeated for every head, which autograd keeps: 2 x 4 x (4 x 128) x 128 bytes in each of 4 blocks, the 2 MiB that
  were too much. `fake_tensors` answers the question for it, and fake and real then agree to the byte.
- PyTorch's MemTracker counts what `LiveStorages` counts; but on fake tensors it takes five times as long, so the deep
  models are left to ours and MemTracker is asked on two blocks.
- Watching operations keeps autograd from adding gradients in place (`test_watching_costs_a_gradient`): under autocast the
  tied embedding's gradient is there three times, in truth twice. So nothing here is tied and under autocast; that case is
  held to the allocator's own events elsewhere.
- The optimizer's step stands apart: under MemTracker its temporary tensors count as optimizer state.
- The batch itself (8 bytes a token) is no part of an estimate; MemTracker is told of it, so it is taken off again.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from course_lib.memory import PRESETS, estimate
from course_lib.observe import MemoryProbe
from course_lib.observe.allocations import training_tensors
from course_lib.observe.fake import LiveStorages, fake_tensors
from course_lib.training.finetune.fake_step import count_step, fake_step, llama, with_states

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TINY = PRESETS["tiny"]


pytestmark = pytest.mark.usefixtures("one_thread")


def mem_tracker_peak(model, optimizer, batch) -> int:
    tracker = MemTracker()
    tracker.track_external(model, optimizer, batch)
    with tracker:
        model(input_ids=batch, labels=batch).loss.backward()
    return next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]


def test_on_real_tensors_three_counters_see_the_same_peak():
    model = llama(TINY)
    optimizer, batch = with_states(model), torch.zeros(4, 128, dtype=torch.long)
    ours = count_step(model, optimizer, batch)
    probe = MemoryProbe(model, optimizer)
    with probe.measure():
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ours.peak == probe.bytes["peak"]
    assert ours.peak == mem_tracker_peak(model, optimizer, batch) - batch.nbytes


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_fake_tensors_see_what_real_ones_see(checkpointing):
    found = []
    for kind in (nullcontext, fake_tensors):
        with kind():
            model = llama(TINY, checkpointing=checkpointing)
            found.append(count_step(model, with_states(model), torch.zeros(4, 128, dtype=torch.long)))
    assert found[0] == found[1]


def test_the_cause_of_the_six_per_cent_is_a_mask_and_what_comes_of_it():
    """Under the course's own context the same step needs 2 MiB less than under a bare FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    bare, ours = None, fake_step(TINY, dtype=torch.float32, micro_batch=4, seq_len=128)
    with FakeTensorMode():
        model = llama(TINY)
        bare = count_step(model, with_states(model), torch.zeros(4, 128, dtype=torch.long))
    repeated = 4 * 2 * (4 * 128 * 128 * 4)  # blocks x keys and values x (tokens x heads x head_dim x bytes)
    assert bare.peak - ours.peak == repeated
    assert bare.by_operation["aten.clone.default"] == repeated
    assert "aten.clone.default" not in ours.by_operation


def test_watching_costs_a_gradient():
    """The allocator's own events against a counter that watches operations, for a tied embedding on real tensors."""
    shape, batch = replace(TINY, vocab=16384, tied=True, layers=1), torch.zeros(1, 8, dtype=torch.long)
    extra = {}
    for mixed in (False, True):
        model = llama(shape)
        optimizer, autocast = with_states(model), torch.autocast("cpu", torch.bfloat16, enabled=mixed)
        probe, live = MemoryProbe(model, optimizer), LiveStorages()
        live.hold([*training_tensors(model, optimizer), batch])
        for watch in (probe.measure(), live):
            with watch:
                with autocast:
                    loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                del loss
                model.zero_grad()
        extra[mixed] = (live.highest - batch.nbytes - probe.bytes["peak"]) / (16384 * 128 * 4)
    assert extra[False] == pytest.approx(0, abs=0.01)
    assert extra[True] == pytest.approx(1, abs=0.01)


def test_what_dies_is_no_longer_counted():
    with LiveStorages() as live:
        a = torch.empty(1000)
        view = a[:10]
        b = torch.empty(500)
        assert live.now == 6000
        del a
        assert live.now == 6000
        del view
        assert (live.now, live.highest) == (2000, 6000)
        assert live.by_operation() == {"aten.empty.memory_format": 6000}
        live.reset()
        assert live.highest == 2000
    assert [event[0] for event in live.log] == [True, True, False]
    assert b.numel() == 500


# All blocks once for each model; a few where other branches of the formula are to be held.
@pytest.mark.parametrize(
    "preset, layers, precision, checkpointing, micro_batch, seq_len",
    [
        ("llama-3.1-8b", 32, "bf16", "none", 1, 2048),
        ("llama-3.1-8b", 32, "fp32", "full", 1, 2048),
        ("llama-3.1-8b", 3, "bf16", "full", 2, 2048),
        ("llama-3.1-8b", 3, "bf16", "selective", 1, 2048),
        ("llama-3.1-8b", 3, "fp32", "none", 1, 4096),
        ("llama-3.1-70b", 80, "bf16", "full", 1, 2048),
        ("llama-3.1-70b", 3, "bf16", "none", 1, 4096),
        ("llama-3.1-70b", 3, "fp32", "full", 1, 8192),
        ("smollm2-135m", 3, "fp32", "none", 2, 512),
    ],
)
def test_big_shapes(preset, layers, precision, checkpointing, micro_batch, seq_len):
    shape, sizes = replace(PRESETS[preset], layers=layers), {"seq_len": seq_len}
    told = estimate(
        shape,
        precision=precision,
        activation_checkpointing=checkpointing,
        micro_batch_size=micro_batch,
        step="fused",
        **sizes,
    )
    found = fake_step(shape, dtype=DTYPES[precision], checkpointing=checkpointing, micro_batch=micro_batch, **sizes)
    assert found.weights == told.weights
    assert found.gradients == told.gradients
    assert found.optimizer == told.optimizer
    assert found.step == told.phases["optimizer step"]
    peak = max(size for phase, size in told.phases.items() if phase != "optimizer step")
    assert peak == pytest.approx(found.peak, rel=0.01)  # 5 % are allowed; it has been less than 0.1 %


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "llama-3.1-70b"])
def test_pytorchs_tracker_on_two_blocks(preset):
    shape = replace(PRESETS[preset], layers=2)
    told = estimate(shape, precision="bf16", micro_batch_size=1, seq_len=2048, step="fused")
    with fake_tensors():
        model = llama(shape, dtype=torch.bfloat16)
        optimizer, batch = with_states(model), torch.zeros(1, 2048, dtype=torch.long)
        ours, theirs = count_step(model, optimizer, batch), mem_tracker_peak(model, optimizer, batch) - batch.nbytes
    assert ours.peak == theirs
    peak = max(size for phase, size in told.phases.items() if phase != "optimizer step")
    assert peak == pytest.approx(theirs, rel=0.01)
