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
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from course_lib.launch import launch
from course_lib.memory import PRESETS, Shape, estimate
from course_lib.memory.sharded import resident_bytes
from course_lib.memory.units import units_of
from course_lib.models import llama
from course_lib.observe import MemoryProbe
from course_lib.observe.fake import MOMENTS, CountedStep, become_fake, count_step, fake_ranks, fake_tensors
from course_lib.training.activation_checkpointing import set_checkpointing

TINY, BIG = PRESETS["tiny"], PRESETS["llama-3.1-70b"]
FP32, FP16 = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.float16, torch.float32)
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

pytestmark = pytest.mark.usefixtures("one_thread")


def adamw(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def before_the_update(count: CountedStep) -> int:
    return max(count.moments[moment] for moment in MOMENTS[:3])


# ----------------------------------------------------------------------------------------------- one device
def counted(shape: Shape, dtype=torch.float32, checkpointing="none", sequences=4, tokens=128) -> CountedStep:
    model = llama(shape, dtype=dtype)
    set_checkpointing(model, checkpointing)
    batch = torch.zeros(sequences, tokens, dtype=torch.long)
    return count_step(model, adamw(model), batch, model.model.layers[0])


def test_on_real_tensors_three_counters_see_the_same_peak() -> None:
    model = llama(TINY)
    optimizer, batch = adamw(model), torch.zeros(4, 128, dtype=torch.long)
    count = count_step(model, optimizer, batch, model.model.layers[0])
    assert count_step(model, optimizer, batch, model.model.layers[0]) == count  # the states are there already
    probe, tracker = MemoryProbe(model, optimizer), MemTracker()
    with probe.measure():
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert count.peak == probe.bytes["peak"]
    tracker.track_external(model, optimizer, batch)
    with tracker:
        model(input_ids=batch, labels=batch).loss.backward()
    (tracked,) = (device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    assert before_the_update(count) == tracked - batch.nbytes


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
        ("llama-3.1-8b", 3, "bf16", "selective", 1, 2048),
        ("llama-3.1-70b", 3, "bf16", "full", 1, 8192),
        ("smollm2-135m", 3, "fp32", "none", 2, 512),
    ],
)
def test_a_big_step_needs_what_was_estimated(preset, layers, precision, checkpointing, micro_batch, seq_len) -> None:
    shape = replace(PRESETS[preset], layers=layers)
    settings = {"activation_checkpointing": checkpointing, "micro_batch_size": micro_batch, "seq_len": seq_len}
    need = estimate(shape, precision=precision, **settings)
    with fake_tensors():
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        count = counted(shape, dtype, checkpointing, micro_batch, seq_len)
    assert (count.parameters, count.gradients, count.optimizer) == (need.weights, need.gradients, need.optimizer)
    assert count.moments["optimizer step"] == need.phases["optimizer step"]
    peak = max(size for phase, size in need.phases.items() if phase != "optimizer step")
    assert peak == pytest.approx(before_the_update(count), rel=0.01)  # 5 % are allowed; it has been less than 0.1 %


# -------------------------------------------------------------------------------------------------- ranks
def sharded(shape=TINY, tensors="fake", *, lora=False, policy=FP32, keep=False, tokens=64) -> CountedStep:
    """Count a step of this rank, whose group is up, a fake or a real one; `keep` says that blocks stay gathered."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta" if tensors == "fake" else "cpu"):
        model = llama(shape, dtype=policy.param_dtype if lora else None)
        if lora:
            inject_adapter_in_model(LoraConfig(r=16, target_modules="all-linear"), model)
            for factor in (p for p in model.parameters() if p.requires_grad):
                factor.data = factor.data.float()
    set_checkpointing(model, "full" if lora else "none")
    with fake_tensors() if tensors == "fake" else nullcontext():
        if tensors == "fake":
            become_fake(model)
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return count_step(model, adamw(model), torch.zeros(1, tokens, dtype=torch.long), model.model.layers[0])


def fake(ranks: int, *shape, **settings) -> CountedStep:
    with fake_ranks(ranks):
        return sharded(*shape, **settings)


CASES = [{}, {"lora": True, "policy": BF16, "keep": True}]


def real_steps() -> list[CountedStep]:
    return [sharded(tensors="real", **case) for case in CASES]


def test_a_fake_rank_holds_what_a_real_one_holds(private_tmp) -> None:
    run = launch(real_steps, ranks=2, backend="gloo", quiet=True, timeout=240)
    assert run.results == 2 * [[fake(2, **case) for case in CASES]]  # to the byte, at each moment


def test_a_fake_rank_holds_at_rest_what_the_arithmetic_says() -> None:
    count = fake(4, policy=BF16, tokens=16)
    held = resident_bytes(units_of("tiny"), strategy="fsdp", ranks=4, precision="bf16-mixed", buffers=128)
    expected = (held["parameters"], held["gradients"], held["optimizer_state"])
    assert (count.parameters, count.gradients, count.optimizer) == expected


@pytest.mark.parametrize("tokens", [512, 4096])  # the first block's gather is the peak, and the backward pass
def test_every_further_block_adds_the_same_up_to_seventy_billion(tokens) -> None:
    three, four, five = (fake(32, replace(BIG, layers=n), lora=True, policy=FP16, tokens=tokens) for n in (3, 4, 5))
    a_block = {moment: four.moments[moment] - three.moments[moment] for moment in MOMENTS}
    assert five.moments == {moment: four.moments[moment] + a_block[moment] for moment in MOMENTS}
    lora = {"method": "lora", "precision": "fp16-mixed", "activation_checkpointing": "full"}
    need = estimate(BIG, strategy="fsdp", ranks=32, seq_len=tokens, **lora)
    peak = max(three.moments[moment] + (BIG.layers - 3) * a_block[moment] for moment in MOMENTS)
    assert need.peak == pytest.approx(peak, rel=0.01)


def test_fake_ranks_stand_alone() -> None:
    with pytest.raises(ValueError, match="ranks=0"), fake_ranks(0):
        pass
    with fake_ranks(2), pytest.raises(RuntimeError), fake_ranks(2):
        pass
    assert not dist.is_initialized()
