"""DeepSpeed's ZeRO on real ranks: one rank's losses, a share of the bytes, the traffic of each stage, no fall-backs."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections import Counter
from functools import cache
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from parity import TOLERANCE, Runs, assert_same_training, off_by, one_rank
from refusals import assert_refused

from course_lib.launch import launch
from course_lib.models import tiny_llama

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

from course_lib.training.sharded import accelerate_zero, zero
from course_lib.training.sharded.zero_engine import assert_sharded
from course_lib.training.sharded.zero_keys import KNOWN

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

BUCKET = 200_000  # elements; larger than the largest weight, a quarter of the model
SIZES = dict(steps=3, global_batch=12, seq_len=16, bucket_elements=BUCKET)
NUMELS = [p.numel() for p in tiny_llama().parameters()]
WEIGHTS = 4 * sum(NUMELS)  # bytes in fp32
ROTARY = 4 * 2 * 16  # two buffers of half a head's width
STAGES = {
    2: {stage: dict(stage=stage) for stage in range(4)},
    3: {stage: dict(stage=stage, steps=2) for stage in (2, 3)},
}
USERS_FILE = {  # no optimizer, and three micro-batches
    "train_batch_size": 12,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
}


@pytest.fixture(scope="module")
def stages(private_tmp):
    return Runs(zero.train, STAGES, SIZES)


@pytest.fixture(scope="module")
def choices(private_tmp, tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    (folder / "user.json").write_text(json.dumps(USERS_FILE))
    place = str(folder / "saved")
    settings = {
        "micro-batches": dict(gradient_accumulation_steps=2, max_grad_norm=1e9),
        "clipped": dict(stage=3, max_grad_norm=0.5),
        "optimizer on the host": dict(offload="optimizer"),
        "all on the host": dict(stage=3, offload="all"),
        "bf16": dict(precision="bf16"),
        "user's file": dict(config_file=str(folder / "user.json")),
        "saved": dict(steps=2, save_every=2, checkpoint_dir=place),
        "resumed": dict(resume=True, checkpoint_dir=place),
    }
    return Runs(zero.train, {2: settings}, SIZES)


@cache
def expected(max_grad_norm=0.0):
    """Losses and norms of one process."""
    return one_rank(tiny_llama(), steps=3, global_batch=12, seq_len=16, max_grad_norm=max_grad_norm)


def test_every_stage_trains_as_one_rank_does(stages):
    for ranks, stage, _, outcomes in stages.every():
        assert_same_training(outcomes, expected()[0], f"stage {stage}, {ranks} ranks")
        for outcome in outcomes:
            assert (outcome.wrapper, outcome.extra["stage"]) == ("DeepSpeedEngine", stage)


def share(ranks, stage):
    """Elements of a rank's share: of the flat tensor, or of each weight."""
    if stage == 3:
        return sum(math.ceil(n / ranks) for n in NUMELS)
    return math.ceil(sum(NUMELS) / (2 * ranks)) * 2


def gradients(ranks, rank):
    """Bytes of stages 1 and 2: every weight that lies in the share at least in part, and the padding at the end."""
    local, start, held = share(ranks, 1), 0, 0
    for numel in NUMELS:
        held += numel if start < (rank + 1) * local and start + numel > rank * local else 0
        start += numel
    return 4 * (held + max(0, (rank + 1) * local - start))


def test_what_lies_on_each_rank_to_the_byte(stages):
    for ranks, stage, _, outcomes in stages.every():  # 803,968 weights do not divide by 3
        local = share(ranks, stage)
        for rank, outcome in enumerate(outcomes):
            expected = dict(
                parameters=ROTARY + 4 * local * (1 if stage == 3 else ranks),
                optimizer_state=8 * local + 4,  # two moments, one step counter
                master=4 * local,
                gradients=4 * local if stage == 3 else gradients(ranks, rank),
                buckets=4 * BUCKET if stage == 3 else 0,
            )
            if stage == 0:
                expected |= dict(parameters=ROTARY + WEIGHTS, gradients=WEIGHTS, master=0)
                expected["optimizer_state"] = 2 * WEIGHTS + 4 * len(NUMELS)
            assert {name: outcome.memory[name] for name in expected} == expected, (ranks, stage, rank)
            assert outcome.extra["local_elements"] == (local if stage else sum(NUMELS)), (ranks, stage, rank)


def test_what_each_stage_sends(stages):
    total = Counter()  # bytes that a rank put in, over all steps
    for c in stages[2].collectives:
        total[c.kind] += c.bytes if c.rank == 1 and c.bytes > 100 else 0
    steps = SIZES["steps"]
    # stages 0, 1 and 2 all-reduce all gradients, stage 3 scatters their sums
    assert total["all_reduce"] == pytest.approx(3 * steps * WEIGHTS, rel=1e-3)
    assert total["reduce_scatter"] == steps * WEIGHTS
    # 1 and 2 gather the weights after a step, 3 in its forward and in its backward pass; in its first step it may gather
    # all once more, while it learns the order. A rank puts in its half
    assert 4 * steps * WEIGHTS <= 2 * total["all_gather"] <= (4 * steps + 1) * WEIGHTS
    # on the wire of two ranks: all-reduce 1, all-gather 1/2; gloo's reduce_scatter costs 1, too
    for stage, times in {0: 1.0, 1: 1.5, 2: 1.5, 3: 2.0}.items():
        for outcome in stages.outcomes(2, stage):
            assert outcome.wire_bytes is None or times < outcome.wire_bytes / WEIGHTS < 1.02 * times, stage


def test_no_choice_changes_the_training(choices):
    for _, name, _, outcomes in choices.every():
        losses = expected(0.5 if name == "clipped" else 0.0)[0]
        first = outcomes[0].extra["first_step"]
        assert first == (2 if name == "resumed" else 0)
        if name == "user's file":
            assert outcomes[0].extra["config"]["gradient_accumulation_steps"] == 3
        assert_same_training(outcomes, losses[first:], name, {"bf16": 5e-3, "clipped": 2e-6}.get(name, TOLERANCE))


def test_gradients_are_means_and_clipping_clips(choices):
    assert off_by(expected(0.5)[0], expected()[0]) > 1e-5  # a difference that a clipped run could not hide
    for name, max_grad_norm in {"micro-batches": 1e9, "clipped": 0.5}.items():
        for outcome in choices.outcomes(2, name):
            norms = expected(max_grad_norm)[1]
            assert outcome.extra["gradient_norms"] == pytest.approx(norms, rel=1e-4), name


def test_what_offloading_moves(choices):
    local = 4 * share(2, 2)
    rows = {
        "optimizer on the host": (WEIGHTS + ROTARY, 4 * max(NUMELS), "gradients"),
        "all on the host": (ROTARY, 4 * BUCKET, "parameters"),
    }
    for name, (parameters, buckets, moved) in rows.items():
        for outcome in choices.outcomes(2, name):
            expected = dict(parameters=parameters, buckets=buckets, gradients=0, optimizer_state=0, master=0)
            assert {what: outcome.memory[what] for what in expected} == expected, name
            host = {"optimizer_state": 2 * local + 4, "master": local, moved: local}
            assert host.items() <= outcome.extra["on_host"].items(), name


def test_bf16_halves_weights_and_gradients(choices, stages):
    half, whole = choices.outcomes(2, "bf16")[0], stages.outcomes(2, 2)[0]
    assert half.memory["parameters"] - ROTARY == (whole.memory["parameters"] - ROTARY) / 2
    assert half.memory["gradients"] == whole.memory["gradients"] / 2
    assert all(half.memory[name] == whole.memory[name] for name in ("optimizer_state", "master"))
    assert off_by(half.losses, whole.losses) > 1e-6


def engine(stage, elements):
    """What assert_sharded looks at, of an engine whose optimizer steps so many elements."""
    fake = type("DeepSpeedEngine", (), {})()
    fake.zero_optimization_stage, fake.module = lambda: stage, tiny_llama()
    fake.optimizer = SimpleNamespace(param_groups=[{"params": [torch.empty(elements)]}])
    return fake


def refuse():
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder

    get_accelerator().is_fp16_supported = lambda: False  # as most CPUs
    AsyncIOBuilder.is_compatible = lambda self, verbose=False: False  # as a machine without libaio
    whole = sum(NUMELS)
    assert_refused(
        [
            (lambda: assert_sharded(tiny_llama(), stage=2, ranks=2), RuntimeError, "got LlamaForCausalLM"),
            (lambda: assert_sharded(engine(1, whole), stage=1, ranks=2), RuntimeError, "803,968 of 803,968"),
            (lambda: assert_sharded(engine(0, whole), stage=2, ranks=2), RuntimeError, "stage 0"),
            (lambda: zero.train(expect_ranks=3), RuntimeError, "3 ranks"),
            (lambda: accelerate_zero.train(expect_ranks=3), RuntimeError, "3 ranks"),
            (lambda: zero.train(precision="fp16"), ValueError, "fp16"),
            (lambda: zero.train(stage=3, offload="nvme", nvme_path="/tmp"), ValueError, "libaio"),
            (lambda: zero.train(save_every=1), ValueError, "save_every"),
        ]
    )


def test_nothing_falls_back_in_silence(private_tmp):
    launch(refuse, ranks=2, quiet=True, timeout=120)


def test_the_known_keys_are_deepspeed_s():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields.items()
    assert KNOWN["zero_optimization"] == {field.alias or name for name, field in fields}
