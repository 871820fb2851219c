"""DeepSpeed's ZeRO on real ranks: one rank's losses, a share of the bytes, the traffic of each stage, no fall-backs."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections import Counter
from functools import cache
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from parity import TOLERANCE, Runs, assert_same_training, off_by, one_rank
from refusals import assert_refused

from course_lib.launch import launch
from course_lib.launch.emulation.memory_limit import attempt, memory_limit
from course_lib.models import tiny_llama

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

from course_lib.observe.holdings import ZeroProbe, counted_peak
from course_lib.observe.host import HostCopies, resident_peak
from course_lib.on_cpu.deepspeed import assert_sharded, prepare_deepspeed
from course_lib.training import zero

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

BUCKET = 200_000  # elements; larger than the largest weight, a quarter of the model
SIZES = dict(steps=3, seq_len=16)
NUMELS = [p.numel() for p in tiny_llama().parameters()]
WEIGHTS = 4 * sum(NUMELS)  # bytes in fp32
ROTARY = 4 * 2 * 16  # two buffers of half a head's width
ON_HOST = {"device": "cpu"}


def config(stage, *, clipping=0.0, offload=(), **top):
    """DeepSpeed's configuration; stage 3 lets go of each weight after its use, as with a large model."""
    section = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    section |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    section |= {"stage3_param_persistence_threshold": 0} | {name: ON_HOST for name in offload}
    top |= {"zero_force_ds_cpu_optimizer": False} if offload else {}
    return {"train_batch_size": 12, "gradient_clipping": clipping, "zero_optimization": section} | top


STAGES = {
    2: {stage: dict(config=config(stage)) for stage in (1, 2, 3)},
    3: {stage: dict(config=config(stage), steps=2) for stage in (2, 3)},
}
CHOICES = {
    "micro-batches": config(2, gradient_accumulation_steps=2),
    "micro-batches, clipped": config(2, gradient_accumulation_steps=3, clipping=0.5),
    "clipped": config(3, clipping=0.5),
    "optimizer on the host": config(2, offload=["offload_optimizer"]),
    "all on the host": config(3, offload=["offload_optimizer", "offload_param"]),
    "bf16": config(2, bf16={"enabled": True}),
}


@pytest.fixture(scope="module")
def stages(private_tmp):
    return Runs(zero.train, STAGES, SIZES)


@pytest.fixture(scope="module")
def choices(private_tmp):
    return Runs(zero.train, {2: {name: dict(config=how) for name, how in CHOICES.items()}}, SIZES)


@cache
def expected(max_grad_norm=0.0):
    """Losses of one process."""
    return one_rank(tiny_llama(), steps=3, global_batch=12, seq_len=16, max_grad_norm=max_grad_norm)[0]


def test_every_stage_trains_as_one_rank_does(stages):
    for ranks, stage, _, outcomes in stages.every():
        assert_same_training(outcomes, expected(), f"stage {stage}, {ranks} ranks")
        assert {outcome.wrapper for outcome in outcomes} == {"DeepSpeedEngine"}


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
            assert {name: outcome.memory[name] for name in expected} == expected, (ranks, stage, rank)
            assert outcome.extra["local_elements"] == local, (ranks, stage, rank)


def test_what_each_stage_sends(stages):
    total = Counter()  # bytes that a rank put in, over all steps
    for c in stages[2].collectives:
        total[c.kind] += c.bytes if c.rank == 1 and c.bytes > 100 else 0
    steps = SIZES["steps"]
    # stages 1 and 2 all-reduce all gradients, stage 3 scatters their sums
    assert total["all_reduce"] == pytest.approx(2 * steps * WEIGHTS, rel=1e-3)
    assert total["reduce_scatter"] == steps * WEIGHTS
    # 1 and 2 gather the weights after a step, 3 in its forward and in its backward pass; in its first step it may gather
    # all once more, while it learns the order. A rank puts in its half
    assert 4 * steps * WEIGHTS <= 2 * total["all_gather"] <= (4 * steps + 1) * WEIGHTS
    # on the wire of two ranks: all-reduce 1, all-gather 1/2; gloo's reduce_scatter costs 1, too
    for stage, times in {1: 1.5, 2: 1.5, 3: 2.0}.items():
        for outcome in stages.outcomes(2, stage):
            assert outcome.wire_bytes is None or times < outcome.wire_bytes / WEIGHTS < 1.02 * times, stage


def test_no_choice_changes_the_training(choices):
    assert off_by(expected(0.5), expected()) > 1e-5  # a difference that a clipped run could not hide
    for _, name, _, outcomes in choices.every():
        clipped = name.endswith("clipped")
        tolerance = 5e-3 if name == "bf16" else 2e-6 if clipped else TOLERANCE
        assert_same_training(outcomes, expected(0.5 if clipped else 0.0), name, tolerance)


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
    whole = sum(NUMELS)
    assert_refused(
        [
            (lambda: assert_sharded(tiny_llama()), RuntimeError, "LlamaForCausalLM"),
            (lambda: assert_sharded(engine(0, whole)), RuntimeError, "stage 0"),
            (lambda: assert_sharded(engine(1, whole)), RuntimeError, "803,968 of 803,968"),
            (lambda: zero.train(config(0)), RuntimeError, "stage 0"),
        ]
    )


def test_nothing_falls_back_in_silence(private_tmp, capsys):
    launch(refuse, ranks=2, quiet=True, timeout=120)
    attempt("alone", zero.train, config(2), ranks=1)  # what a launcher that starts one process comes to
    attempt("too small", take, ranks=1)
    alone, too_small = capsys.readouterr().out.splitlines()
    assert "found one" in alone and "zero.py" not in alone and "64000000 bytes" in too_small and "ones" in too_small


def take():
    with memory_limit(2**25):
        torch.ones(16_000_000)


# ------------------------------------------------------------------------------------------------------------ instruments
def instruments():
    """By stage and number of micro-batches, the bytes copied in a step with the optimizer on the host; and a step's peak
    by two instruments."""
    copies = {}
    for stage, micro_batches in ((1, 1), (1, 3), (2, 1), (2, 3)):
        settings = dict(bf16={"enabled": True}, gradient_accumulation_steps=micro_batches)
        engine, step = made(config(stage, offload=["offload_optimizer"], **settings))
        step()  # makes the host's buffers
        with HostCopies(engine) as counted:
            step()
        copies[stage, micro_batches] = counted.down, counted.up
    engine, step = made(config(2))
    step()
    with ZeroProbe(engine).measure() as probe:
        step()
    return copies, probe.bytes["peak"], counted_peak(engine, step)


def made(how):
    """An engine, and a function that takes one whole step with it."""
    prepare_deepspeed()
    import deepspeed

    model, batch = tiny_llama(), torch.zeros(2, 16, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=how)

    def step():
        for _ in range(engine.gradient_accumulation_steps()):
            engine(input_ids=batch, labels=batch).loss.backward()
            engine.step()

    return engine, step


def test_instruments_of_offloading_and_of_the_peak(private_tmp):
    for copies, peak, counted in launch(instruments, ranks=2, threads=1, quiet=True, timeout=120).results:
        local = 2 * share(2, 2)  # bytes of a share in 16 bits
        for micro_batches in (1, 3):  # whole gradients are summed on the device: they come down once, in fp32
            assert copies[1, micro_batches] == (2 * local, local)
        assert copies[2, 1] == (2 * local, local)
        down, up = copies[2, 3]
        # every micro-batch down, the sum so far up again, at last the sum in fp32; tensors on a border are whole
        assert 5 * local <= down < 5.4 * local and 3 * local <= up < 3.3 * local
        assert counted == peak  # the batch was there before, so neither counts it


def test_the_pages_of_a_rank_are_seen_to_come_and_go(tmp_path):
    path, size = tmp_path / "weights", 32 * 2**20
    path.write_bytes(bytes(size))
    with resident_peak() as seen:
        mapped = torch.from_file(str(path), size=size // 4)
        mapped.sum()
        block = torch.ones(size // 4)
        time.sleep(0.05)  # longer than the pause between two looks
        del block, mapped
    assert abs(seen["mapped"] - size) < 2**22 and abs(seen["resident"] - 2 * size) < 2**23
    with resident_peak() as seen:
        time.sleep(0.01)
    assert seen["resident"] < 2**22
