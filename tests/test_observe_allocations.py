"""Recorded allocations: to the byte, in order, older tensors known; and the curve that is drawn from them."""

from __future__ import annotations

import pytest
import torch

from course_lib.memory.allocator import replay
from course_lib.models import tiny_llama
from course_lib.observe import observe
from course_lib.observe.allocations import memory_over_time, record_allocations, training_tensors


def test_every_allocation_and_free_with_its_size():
    keep = []

    def fn():
        one = torch.empty(1000)
        keep.append(torch.empty(500, dtype=torch.float64))
        del one

    events = record_allocations(fn)
    assert [(e.allocate, e.id, e.bytes) for e in events] == [(True, 0, 4000), (True, 1, 4000), (False, 0, 4000)]
    assert 0 < events[0].at <= events[1].at <= events[2].at
    assert memory_over_time(events) == [(0, 0), (events[0].at, 4000), (events[1].at, 8000), (events[2].at, 4000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_allocates_its_result_alone_on_every_cpu(dtype):
    a, b = torch.ones(96, 352, dtype=dtype), torch.ones(352, 128, dtype=dtype)
    keep = []
    events = record_allocations(lambda: keep.append(a @ b))
    assert [(e.allocate, e.bytes) for e in events] == [(True, keep[0].nbytes)]  # no copies of oneDNN's
    assert torch.backends.mkldnn.enabled


def test_what_was_there_before_comes_first_and_is_known_when_it_goes():
    box = [torch.empty(300), torch.empty(100)]
    view = box[0][:50]
    stranger = [torch.empty(77)]

    def fn():
        stranger.clear()
        box.pop(1)

    events = record_allocations(fn, [*box, view])
    assert [(e.allocate, e.id, e.bytes) for e in events] == [(True, 0, 1200), (True, 1, 400), (False, 1, 400)]
    assert memory_over_time(events)[0] == (0, 1600)


def test_a_step_of_the_tiny_llama_peaks_where_the_probe_says_and_ends_where_it_began():
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.ones(2, 64, dtype=torch.long)

    def step():
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    seen = observe(model, optimizer, measured_step=0)
    with seen.step(tokens=128):
        step()
    held = training_tensors(model, optimizer)
    events = record_allocations(step, held)
    curve = memory_over_time(events)
    resident = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    assert curve[0] == (0, resident)
    assert curve[-1][1] == resident
    assert max(now for _, now in curve) == seen.memory["peak"]
    assert all(before[0] < after[0] for before, after in zip(curve, curve[1:], strict=False))
    assert replay(event[1:] for event in events).allocated_peak >= seen.memory["peak"]


def test_gradients_of_an_earlier_step_are_seen_to_go():
    model = tiny_llama()
    batch = torch.ones(1, 16, dtype=torch.long)
    model(input_ids=batch, labels=batch).loss.backward()
    bytes_of_gradients = sum(4 * p.numel() for p in model.parameters())
    events = record_allocations(model.zero_grad, training_tensors(model))
    curve = memory_over_time(events)
    assert curve[0][1] - curve[-1][1] == bytes_of_gradients


def test_a_device_without_such_a_record_is_refused():
    with pytest.raises(ValueError, match="move the model there"):
        record_allocations(lambda: None, [torch.empty(3, device="meta")])
