"""What each rank holds, predicted, against the papers' numbers and, to the byte, against real ranks of DeepSpeed and FSDP2."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import cloudpickle
import pytest

from course_lib.launch import launch
from course_lib.memory import PRESETS, estimate, state_bytes
from course_lib.memory.sharded import HELD, resident_bytes
from course_lib.memory.units import Tensor, units_of
from course_lib.models import tiny_llama

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SEVEN = units_of("megatron-7.5b")  # the 7.5B model of arXiv:1910.02054, figure 1
SMALL = dict(steps=2, seq_len=128, hidden=128, layers=2)
SHAPE = replace(PRESETS["tiny"], layers=2)
BUCKET = 300_000  # elements
BUFFERS = 128  # the tiny model's rotary frequencies, two tensors of 16
PEAK = 0.05

# name -> (settings of the real program, of `resident_bytes`)
ZERO = {
    "zero0": (dict(stage=0), {}),
    "zero1": (dict(stage=1), {}),
    "zero2": (dict(stage=2), {}),
    "zero3": (dict(stage=3), {}),
    "zero2 offload": (dict(stage=2, offload="optimizer"), dict(offload="optimizer")),
    "zero3 offload": (dict(stage=3, offload="all"), dict(offload="all")),
}
FSDP = {
    "fsdp": (dict(), {}),
    "fsdp no reshard": (dict(reshard_after_forward="no"), dict(reshard_after_forward=False)),
    "fsdp bf16-mixed": (dict(precision="bf16-mixed"), dict(precision="bf16-mixed")),
    "fsdp lora": (dict(method="lora", lora_rank=5), {}),
    "fsdp lora bf16-mixed": (dict(method="lora", lora_rank=4, precision="bf16-mixed"), dict(precision="bf16-mixed")),
    "fsdp qlora": (dict(method="qlora", lora_rank=4), {}),
}


def train_all(zero_cases, fsdp_cases):
    """On a rank: (bytes by category, bytes on the host, bytes of quantization constants) after each program."""
    import torch

    from course_lib.training.sharded import fsdp, zero

    torch.set_num_threads(1)
    ranks = torch.distributed.get_world_size()
    found = {}
    for name, settings in zero_cases.items():
        run = zero.train(**SMALL, **settings, global_batch=2 * ranks, bucket_elements=BUCKET)
        found[name] = (run.memory, run.extra["on_host"], 0)
        gc.collect()  # an engine is full of cycles
    for name, settings in fsdp_cases.items():
        run = fsdp.train(**SMALL, **settings, global_batch=2 * ranks)
        found[name] = (run.memory, {}, run.extra["quantization_constants"])
    return found


def real(ranks, names):
    cases = [{name: settings for name, (settings, _) in table.items() if name in names} for table in (ZERO, FSDP)]
    return launch(train_all, *cases, ranks=ranks, quiet=True, timeout=300).results


@pytest.fixture(scope="module")
def seen(private_tmp):
    """Two ranks meet all cases, three those where something does not divide."""
    return {2: real(2, {*ZERO, *FSDP}), 3: real(3, {"zero2", "zero3", "fsdp", "fsdp lora"})}


def small_units(name):
    settings = FSDP.get(name, ({}, {}))[0]
    return units_of(
        SHAPE,
        method=settings.get("method", "full"),
        lora_rank=settings.get("lora_rank", 16),
    )


def check(name, ranks, results):
    strategy, how = name.split()[0], (ZERO | FSDP)[name][1]
    for rank, result in enumerate(results):
        memory, on_host, constants = result[name]
        told = resident_bytes(
            small_units(name), strategy=strategy, ranks=ranks, rank=rank, bucket_elements=BUCKET, buffers=BUFFERS, **how
        )
        held = {category: memory.get(category, 0) + on_host.get(category, 0) for category in HELD}
        assert {category: told[category] for category in HELD} == held, f"{name}, rank {rank} of {ranks}"
        assert told["host"] == (sum(on_host.values()) if on_host else 0)


@pytest.mark.parametrize("name", [*ZERO, *FSDP])
def test_two_real_ranks_hold_what_was_predicted(seen, name):
    check(name, 2, seen[2])


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp", "fsdp lora"])
def test_three_real_ranks_where_rows_and_elements_do_not_divide(seen, name):
    check(name, 3, seen[3])
    paddings = [
        resident_bytes(small_units(name), strategy=name.split()[0], ranks=3, rank=rank, bucket_elements=0)["padding"]
        for rank in range(3)
    ]
    assert paddings[2] > paddings[0], "the last rank has the padding"


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp", "fsdp no reshard", "fsdp bf16-mixed"])
def test_the_peak_of_a_real_step_is_the_estimates(seen, name):
    settings = (ZERO | FSDP)[name][0]
    told = estimate(
        SHAPE,
        strategy=name.split()[0],
        ranks=2,
        micro_batch_size=2,
        seq_len=SMALL["seq_len"],
        precision=settings.get("precision", "fp32"),
        device="cpu",
        step="loop" if name.startswith("zero") else "fused",
        bucket_elements=BUCKET,
        reshard_after_forward="no" not in name,
    )
    assert told.peak == pytest.approx(seen[2][0][name][0]["peak"], rel=PEAK), told.phases


@pytest.mark.parametrize(("stage", "gb"), [(2, 16.6), (3, 1.9)])
def test_the_papers_figure_1(stage, gb):
    """arXiv:1910.02054, figure 1: 7.5B parameters on 64 GPUs, 120 GB without ZeRO."""
    parameters = sum(tensor.elements for unit in SEVEN for tensor in unit)
    held = resident_bytes(SEVEN, strategy=f"zero{stage}", ranks=64, rank=9, precision="bf16", bucket_elements=1)
    assert held["total"] == pytest.approx(state_bytes(parameters, ranks=64, stage=stage), rel=0.01)
    assert held["total"] / 1e9 == pytest.approx(gb, rel=0.02)
    assert resident_bytes(SEVEN, strategy="zero0", ranks=64, precision="bf16")["total"] / 1e9 == pytest.approx(
        120, rel=0.01
    )


def test_stage_1_of_deepspeed_keeps_no_more_gradients_than_stage_2():
    """The paper has 31.4 GB: whole gradients. DeepSpeed lets go of what is not in the slice before the step, too."""
    one, two = (resident_bytes(SEVEN, strategy=f"zero{stage}", ranks=64, precision="bf16") for stage in (1, 2))
    assert one == two


def test_nothing_is_lost_between_the_ranks():
    units = [[(7, 3), (1,), (5,)], [Tensor((4, 4), trainable=False), (2, 2, 3)]]
    trained, whole, tensors = 21 + 1 + 5 + 12, 21 + 1 + 5 + 16 + 12, 4
    for ranks in (1, 2, 3, 4, 9):
        every = [resident_bytes(units, strategy="fsdp", ranks=ranks, rank=rank) for rank in range(ranks)]
        assert sum(held["optimizer_state"] for held in every) == 8 * trained + 4 * tensors * ranks
        assert sum(held["parameters"] + held["gradients"] - held["padding"] for held in every) == 4 * (whole + trained)
        every = [
            resident_bytes(units, strategy="zero3", ranks=ranks, rank=rank, bucket_elements=0) for rank in range(ranks)
        ]
        assert sum(held["total"] - held["padding"] for held in every) == 4 * whole + 16 * trained + 4 * ranks
        every = [
            resident_bytes(units, strategy="zero1", ranks=ranks, rank=rank, gradients=False) for rank in range(ranks)
        ]
        assert sum(held["total"] - held["padding"] for held in every) == 4 * whole * ranks + 12 * trained + 4 * ranks


def test_total_is_the_sum_and_gradients_go():
    for strategy, left in (("ddp", 0), ("zero0", 0), ("zero1", 0), ("zero2", 0), ("fsdp", 0), ("zero3", 4 * (6 + 2))):
        held = resident_bytes([[(4, 3), (4,)]], strategy=strategy, ranks=2, bucket_elements=3)
        later = resident_bytes([[(4, 3), (4,)]], strategy=strategy, ranks=2, bucket_elements=3, gradients=False)
        assert held["total"] == sum(held[name] for name in HELD) and later["gradients"] == left
        assert later["total"] == held["total"] - held["gradients"] + left


def test_a_hybrid_shares_among_the_ranks_of_one_copy():
    two = resident_bytes(SEVEN, strategy="fsdp", ranks=2, rank=1)
    assert resident_bytes(SEVEN, strategy="fsdp", ranks=8, rank=3, shard_ranks=2) == two


def test_deepspeeds_threshold_leaves_a_small_model_whole():
    units = units_of("tiny")
    small = resident_bytes(units, strategy="zero3", ranks=2, persist_elements=100_000)
    assert small["gathered"] == 2 * small["parameters"] == 4 * PRESETS["tiny"].parameters


@pytest.mark.parametrize("method", ["full", "lora"])
def test_units_of_a_shape_are_those_of_the_model(method):
    from course_lib.training.finetune.building import prepare

    model = tiny_llama()
    if method == "lora":
        model = prepare(model, method="lora", precision="fp32", lora_rank=4, device="cpu")
    ours = units_of("tiny", method=method, lora_rank=4)
    assert [[t._replace(element=0) for t in unit] for unit in units_of(model)] == ours
    assert len(ours) == 6  # before, four blocks, after


BAD = {
    "strategy": (dict(strategy="zero4"), "strategy='zero4' is no choice: did you mean 'zero3'?"),
    "rank": (dict(strategy="ddp", rank=2), "rank=2 is none of the 2 ranks: give 0 to 1."),
    "mixed": (dict(strategy="zero1", precision="bf16-mixed"), "precision='bf16-mixed' is not DeepSpeed's"),
    "hybrid of zero": (dict(strategy="zero1", shard_ranks=1), "shard_ranks is fsdp's: under zero1 all 2 ranks share"),
    "hybrid": (dict(strategy="fsdp", ranks=6, shard_ranks=4), "shard_ranks=4 does not divide 6 ranks."),
    "offload": (
        dict(strategy="ddp", offload="optimizer"),
        "offload='optimizer' puts the optimizer on the host, which zero1, zero2 or zero3 can do and ddp cannot.",
    ),
    "offload all": (
        dict(strategy="zero2", offload="all"),
        "offload='all' puts weights on the host, which zero3 or fsdp can do",
    ),
    "trainable": (dict(strategy="ddp", trainable=[[True]]), "trainable has another form than units"),
}


@pytest.mark.parametrize(("given", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_a_sentence(given, sentence):
    with pytest.raises(ValueError) as error:
        resident_bytes([[(4, 3), (4,)]], **({"ranks": 2} | given))
    assert str(error.value).startswith(sentence)


def test_shapes_that_are_none():
    with pytest.raises(ValueError, match="units is empty"):
        resident_bytes([], strategy="ddp", ranks=2)
    with pytest.raises(ValueError, match="is no shape"):
        resident_bytes([[4, 3]], strategy="ddp", ranks=2)
