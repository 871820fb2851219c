"""One FSDP2 step on fake tensors and fake ranks against the same step on real ones, byte by byte."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch
from course_lib.memory import PRESETS
from course_lib.memory.sharded import resident_bytes
from course_lib.memory.units import units_of
from course_lib.models import tiny_llama
from course_lib.training.sharded.fake_fsdp import MOMENTS, ShardedStorages, count_step, fake_fsdp, fake_ranks

CASES = {
    "full": {"method": "full"},
    "lora": {"method": "lora"},
    "kept": {"method": "full", "reshard_after_forward": False},
    "checkpointed": {"method": "full", "activation_checkpointing": "full"},
}


def real_steps():
    from course_lib.training.finetune.building import build_optimizer, prepare, trainable
    from course_lib.training.sharded.fsdp_sharding import shard

    found = {}
    for name, case in CASES.items():
        how = dict(case)
        reshard = how.pop("reshard_after_forward", True)
        model = prepare(tiny_llama(), precision="fp32", device="cpu", **how)
        model = shard(model, reshard_after_forward=reshard)
        optimizer = build_optimizer(trainable(model), "adamw", 1e-4)
        found[name] = count_step(model, optimizer, torch.zeros(1, 64, dtype=torch.long))
    return found


@pytest.fixture(scope="module")
def real():
    return launch(real_steps, ranks=2, backend="gloo", quiet=True, timeout=240).results


@pytest.mark.parametrize("name", CASES)
def test_a_fake_rank_holds_what_a_real_one_holds(real, name):
    fake = fake_fsdp(PRESETS["tiny"], ranks=2, precision="fp32", seq_len=64, **CASES[name])
    for rank in real:
        assert (fake.parameters, fake.gradients, fake.optimizer) == (
            rank[name].parameters,
            rank[name].gradients,
            rank[name].optimizer,
        )
    for moment in MOMENTS[:3]:  # gloo's thread may let a unit's flat row go a little later, never earlier
        lowest = min(rank[name].moments[moment] for rank in real)
        assert fake.moments[moment] <= lowest <= 1.1 * fake.moments[moment], moment
    assert fake.peak == pytest.approx(min(rank[name].peak for rank in real), rel=0.02)


def test_what_lies_at_rest_is_what_the_arithmetic_says():
    fake = fake_fsdp(PRESETS["tiny"], ranks=4, precision="bf16-mixed", seq_len=16)
    told = resident_bytes(units_of("tiny"), strategy="fsdp", ranks=4, precision="bf16-mixed", buffers=128)
    assert (fake.parameters, fake.gradients, fake.optimizer) == (
        told["parameters"],
        told["gradients"],
        told["optimizer_state"],
    )


def test_every_further_block_adds_the_same():
    counts = [
        fake_fsdp(
            replace(PRESETS["tiny"], layers=n),
            ranks=8,
            method="lora",
            precision="fp16-mixed",
            activation_checkpointing="full",
            seq_len=64,
        )
        for n in (3, 4, 6)
    ]
    three, four, six = counts
    for moment in MOMENTS:
        assert six.moments[moment] == three.moments[moment] + 3 * (four.moments[moment] - three.moments[moment])
    assert six.resident == three.resident + 3 * (four.resident - three.resident)


def test_units_of_their_own_for_the_ends_lower_the_peak():
    shape = replace(PRESETS["tiny"], vocab=8192)
    whole, apart = (fake_fsdp(shape, ranks=4, precision="fp32", seq_len=16, ends=ends) for ends in (False, True))
    assert apart.parameters == whole.parameters
    assert apart.moments[MOMENTS[0]] < whole.moments[MOMENTS[0]] - 4 * 8192 * 128


def test_what_is_resized_to_nothing_is_gone():
    with ShardedStorages() as live:
        row = torch.ones(1000)
        assert live.now == 4000
        row.untyped_storage().resize_(0)
        assert live.now == 0 and live.highest == 4000
        live.begin()
        row.untyped_storage().resize_(8000)
        del row
    assert [size for _, size in live.curve] == [0, 8000, 0]
    assert torch.UntypedStorage.resize_.__name__ == "resize_" and not hasattr(
        torch.UntypedStorage.resize_, "__wrapped__"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 0},
        {"ranks": 2.0},
        {"ranks": 4, "method": "qlora"},
        {"ranks": 4, "mesh": "3x2"},
        {"ranks": 4, "reshard_after_forward": 3},
    ],
)
def test_what_cannot_be_counted_is_a_sentence(wrong):
    with pytest.raises(ValueError):
        fake_fsdp(PRESETS["tiny"], **{"seq_len": 16, "precision": "fp32", **wrong})
    assert not dist.is_initialized(), "the fake group went away with the error"


def test_no_fake_ranks_beside_real_ones():
    with fake_ranks(2), pytest.raises(RuntimeError, match="outside of launch"):
        fake_fsdp(PRESETS["tiny"], ranks=2)
