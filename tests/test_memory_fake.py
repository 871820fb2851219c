"""Steps on fake tensors and fake ranks against real ones and against `estimate`, up to Llama 3.1 8B and 70B.

Watching operations keeps autograd from adding gradients in place (course_lib/observe/fake.py), so nothing here is tied
and under autocast; test_memory_measured.py holds that case to the allocator's own events. The optimizer's step stands
apart: under PyTorch's MemTracker its temporary tensors count as optimizer state. The batch is taken off.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from refusals import assert_refused
from torch.distributed._tools.mem_tracker import MemTracker

from course_lib.launch import launch
from course_lib.memory import PRESETS, Shape, estimate
from course_lib.memory.sharded import resident_bytes
from course_lib.memory.units import units_of
from course_lib.models import llama, tiny_llama
from course_lib.observe import MemoryProbe
from course_lib.observe.fake import MOMENTS, CountedStep, count_step, fake_ranks, fake_tensors
from course_lib.training.finetune.activation_checkpointing import set_checkpointing
from course_lib.training.sharded.fake_fsdp import fake_fsdp
from course_lib.training.sharded.fsdp_sharding import blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TINY = PRESETS["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")


def mem_tracker_peak(model, optimizer, batch) -> int:
    tracker = MemTracker()
    tracker.track_external(model, optimizer, batch)
    with tracker:
        model(input_ids=batch, labels=batch).loss.backward()
    return next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]


# ----------------------------------------------------------------------------------------------- one device
def counted(shape: Shape, dtype=torch.float32, checkpointing="none", sequences=4, tokens=128) -> CountedStep:
    model = llama(shape, dtype=dtype)
    set_checkpointing(model, checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return count_step(model, optimizer, torch.zeros(sequences, tokens, dtype=torch.long), blocks(model)[0])


def before_the_update(count: CountedStep) -> int:
    return max(count.moments[moment] for moment in MOMENTS[:3])


def test_on_real_tensors_three_counters_see_the_same_peak() -> None:
    model = llama(TINY)
    optimizer, batch = torch.optim.AdamW(model.parameters(), fused=True), torch.zeros(4, 128, dtype=torch.long)
    count = count_step(model, optimizer, batch, blocks(model)[0])
    probe = MemoryProbe(model, optimizer)
    with probe.measure():
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert count.peak == probe.bytes["peak"]
    assert before_the_update(count) == mem_tracker_peak(model, optimizer, batch) - batch.nbytes


def test_fake_tensors_see_what_real_ones_see() -> None:
    for checkpointing in ("none", "selective", "full"):
        counts = []
        for kind in (nullcontext, fake_tensors):
            with kind():
                counts.append(counted(TINY, checkpointing=checkpointing))
        assert counts[0] == counts[1], checkpointing


@pytest.mark.parametrize(
    ("preset", "layers", "precision", "checkpointing", "micro_batch", "seq_len"),
    [
        ("llama-3.1-8b", 32, "bf16", "none", 1, 2048),
        ("llama-3.1-8b", 3, "fp32", "full", 2, 4096),
        ("llama-3.1-8b", 3, "bf16", "selective", 1, 2048),
        ("llama-3.1-70b", 3, "bf16", "full", 1, 8192),
        ("smollm2-135m", 3, "fp32", "none", 2, 512),
    ],
)
def test_a_big_step_needs_what_was_estimated(preset, layers, precision, checkpointing, micro_batch, seq_len) -> None:
    shape = replace(PRESETS[preset], layers=layers)
    need = estimate(
        shape,
        precision=precision,
        activation_checkpointing=checkpointing,
        micro_batch_size=micro_batch,
        seq_len=seq_len,
    )
    with fake_tensors():
        count = counted(shape, DTYPES[precision], checkpointing, micro_batch, seq_len)
    assert (count.parameters, count.gradients, count.optimizer) == (need.weights, need.gradients, need.optimizer)
    assert count.moments["optimizer step"] == need.phases["optimizer step"]
    peak = max(size for phase, size in need.phases.items() if phase != "optimizer step")
    assert peak == pytest.approx(before_the_update(count), rel=0.01)  # 5 % are allowed; it has been less than 0.1 %


# -------------------------------------------------------------------------------------------------- ranks
CASES = {
    "full": {"method": "full"},
    "lora": {"method": "lora", "reshard_after_forward": False, "activation_checkpointing": "full"},
}


def real_fsdp_steps():
    from course_lib.training.finetune.building import build_optimizer, prepare, trainable
    from course_lib.training.sharded.fsdp_sharding import shard

    counts = {}
    for name, case in CASES.items():
        settings = dict(case)
        reshard = settings.pop("reshard_after_forward", True)
        model = prepare(tiny_llama(), precision="fp32", device="cpu", **settings)
        model = shard(model, reshard_after_forward=reshard)
        optimizer = build_optimizer(trainable(model), "adamw", 1e-4)
        counts[name] = count_step(model, optimizer, torch.zeros(1, 64, dtype=torch.long), blocks(model)[0])
    return counts


def test_a_fake_rank_holds_what_a_real_one_holds(private_tmp) -> None:
    ranks = launch(real_fsdp_steps, ranks=2, backend="gloo", quiet=True, timeout=240).results
    for name, case in CASES.items():
        fake = fake_fsdp(TINY, ranks=2, precision="fp32", seq_len=64, **case)
        assert [results[name] for results in ranks] == [fake, fake], name  # to the byte, at each moment


def test_a_fake_rank_holds_at_rest_what_the_arithmetic_says() -> None:
    fake = fake_fsdp(TINY, ranks=4, precision="bf16-mixed", seq_len=16)
    held = resident_bytes(units_of("tiny"), strategy="fsdp", ranks=4, precision="bf16-mixed", buffers=128)
    expected = (held["parameters"], held["gradients"], held["optimizer_state"])
    assert (fake.parameters, fake.gradients, fake.optimizer) == expected


def test_every_further_block_adds_the_same() -> None:
    settings = {"precision": "bf16-mixed", "activation_checkpointing": "full", "seq_len": 64}
    three, four, six = (fake_fsdp(replace(TINY, layers=n), ranks=8, **settings) for n in (3, 4, 6))
    for moment in MOMENTS:
        a_block = four.moments[moment] - three.moments[moment]
        assert six.moments[moment] == three.moments[moment] + 3 * a_block, moment
    assert six.resident == three.resident + 3 * (four.resident - three.resident)


def test_what_cannot_be_counted_is_refused() -> None:
    def count(**settings):
        return fake_fsdp(TINY, **{"seq_len": 16, "precision": "fp32", **settings})

    assert_refused(
        [
            (lambda: count(ranks=0), ValueError, "ranks=0"),
            (lambda: count(ranks=4, method="qlora"), ValueError, "method='qlora'"),
        ]
    )
    assert not dist.is_initialized(), "the fake group went away with the error"
    with fake_ranks(2):
        assert_refused([(lambda: count(ranks=2), RuntimeError, "launch()")])
