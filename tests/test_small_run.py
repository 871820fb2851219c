"""A plan for large machines, run small: the same split by the fitting program, with one rank's losses."""

from __future__ import annotations

import importlib.util

import pytest
from plan_cases import LLAMA, a_plan

from course_tools.planning import plan, small_run
from course_tools.planning.files import program_of

TOLERANCE = 1e-5  # fp32, the order of sums alone differs; seen: 1e-7
HUGE = a_plan(
    "zero1",
    model="llama-3.1-405b",
    on="2048x8xh100-80gb",
    dp=128,
    tp=8,
    pp=16,
    micro_batch_size=1,
    num_microbatches=16,
    virtual_stages=4,
    sequence_parallel=True,
    activation_checkpointing="selective",
    seq_len=8192,
    precision="bf16-mixed",
)

# The wrapper on each rank, by the plan: (plan, the most ranks, wrapper, grid)
FULL = {
    "three_d": (HUGE, 4, "LlamaStage", dict(pp=2, tp=2)),
    "fsdp": (
        a_plan("fsdp", dp=64, on="8x8xh100-80gb", model="llama-3.1-8b", precision="bf16-mixed"),
        None,
        "FSDPLlamaForCausalLM",
        dict(dp=2),
    ),
    "ddp": (
        a_plan("ddp", dp=4, on="4xrtx4090", model="qwen3-0.6b", num_microbatches=1),
        4,
        "DistributedDataParallel",
        dict(dp=4),
    ),
    "pipeline_parallel": (
        a_plan("single", dp=1, pp=8, virtual_stages=3, num_microbatches=16, on="8xh100-80gb"),
        None,
        "ScheduleInterleaved1F1B",
        dict(pp=2),
    ),
    "context_parallel": (
        a_plan("ddp", dp=1, cp=8, on="8xh100-80gb", seq_len=131072),
        None,
        "LlamaForCausalLM",
        dict(cp=2),
    ),
    "single": (a_plan("zero3", dp=16, on="2x8xh100-80gb", offload="all"), 1, "LlamaForCausalLM", {}),
}


@pytest.fixture(scope="module")
def runs(private_tmp):
    return {name: small_run.run(one, ranks=ranks, steps=2) for name, (one, ranks, *_) in FULL.items()}


@pytest.fixture(scope="module")
def oracle(runs):
    return small_run.one_rank(runs["fsdp"])


@pytest.mark.parametrize("name", FULL)
def test_the_split_stays_and_the_losses_are_one_rank_s(name, runs, oracle):
    result, (_, _, wrapper, grid) = runs[name], FULL[name]
    assert result.program.startswith("course_lib.training.") and result.program.endswith(f".{name}")
    axes = {"dp": 1, "tp": 1, "pp": 1, "cp": 1} | grid
    assert {axis: getattr(result.grid, axis) for axis in axes} == axes
    assert [outcome.rank for outcome in result.outcomes] == list(range(result.grid.size))
    assert {outcome.wrapper for outcome in result.outcomes} == {wrapper}
    assert max(abs(a / b - 1) for a, b in zip(result.losses, oracle, strict=True)) < TOLERANCE
    assert "Not proven: the step's time" in result.sentence and f" with {result.program}. Shrunk: " in result.sentence


def test_the_sentence_says_what_was_shrunk_and_what_is_unlike(runs):
    said = runs["three_d"].sentence
    assert said.startswith("Full training by ZeRO-1 ran on 4 CPU ranks (PP 2 x TP 2) with ")
    for words in (
        "llama-3.1-405b to the tiny Llama",
        "bf16-mixed to fp32",
        "PP 16 x DP 128 x TP 8 to PP 2 x TP 2",
        "4 virtual stages per rank to 1",
        "2,048 sequences of 8,192 tokens a step to 8 of 32",
        "keeps all activations",
        "FSDP2 instead of ZeRO-1",
    ):
        assert words in said
    assert "Unlike the plan" not in runs["fsdp"].sentence


def test_shrinking():
    small = small_run.shrunk(HUGE)
    assert (small.dp, small.tp, small.pp, small.gpus, small.machines.cpu, small.virtual_stages) == (2, 2, 2, 8, True, 1)
    assert small.global_batch == small.dp * small.micro_batch_size * small.num_microbatches == 8
    assert (small.strategy, small.activation_checkpointing, small.sequence_parallel) == ("zero1", "selective", True)
    assert small_run.shrunk(HUGE, 2).grid.tp == 2 and small_run.shrunk(HUGE, 2).gpus == 2
    assert small_run.shrunk(a_plan("fsdp", dp=2), 8).dp == 2  # no more than the plan has
    assert small_run.shrunk(a_plan("fsdp", dp=6, on="8xcpu"), 8).dp == 4
    joined = small_run.shrunk(a_plan("zero1", dp=2, tp=8, cp=16, on="32x8xh100-80gb"))
    assert (joined.dp, joined.tp, joined.cp) == (2, 2, 1)
    for ranks in range(1, 9):
        for one in (HUGE, joined, *(case[0] for case in FULL.values())):
            less = small_run.shrunk(one, ranks)
            assert less.gpus <= ranks and less.global_batch == less.dp * less.micro_batch_size * less.num_microbatches
            assert program_of(less)


def test_every_best_plan_of_everyday_questions_has_a_small_run():
    for on in ("2x24GiB", "8xa100-80gb", "2x8xh100-80gb"):
        for one in plan("llama-3.1-8b", on, global_batch=32, seq_len=2048, methods=("full",), keep=5).plans:
            assert program_of(small_run.shrunk(one))


def test_adapters_train_by_the_course_s_programs(private_tmp):
    result = small_run.run(a_plan("fsdp", method="qlora", **LLAMA), steps=2)
    assert result.program == "course_lib.training.sharded.fsdp" and result.losses[1] < result.losses[0]
    assert result.outcomes[1].extra["quantization_constants"] > 0
    with pytest.raises(ValueError, match="trained adapters, and one_rank trains all weights"):
        small_run.one_rank(result)


@pytest.mark.skipif(importlib.util.find_spec("axolotl") is None, reason="Axolotl is not installed")
def test_adapters_under_ddp_and_zero_train_by_axolotl_s_yaml(private_tmp):
    """The YAML of plan_files, in Axolotl's own trainer."""
    one = a_plan(
        "zero1", method="qlora", offload="optimizer", activation_checkpointing="selective", lora_rank=4, **LLAMA
    )
    result = small_run.run(one, steps=2)
    assert result.program == "axolotl.cli.train" and len(result.losses) == 2 and result.losses[1] < result.losses[0]
    for held in (outcome.extra for outcome in result.outcomes):
        assert (held["wrapper"], held["zero_stage"], held["world_size"]) == ("DeepSpeedEngine", 1, 2)
        assert held["quantized"] == 4 * 7
        assert held["optimizer_elements"] == held["trainable_elements"]  # two moments of half the adapters
    assert result.arguments["selective_checkpointing"] and result.sentence.startswith(
        "QLoRA by ZeRO-1 ran on 2 CPU ranks"
    )


def test_zero_is_deepspeed_s_engine(private_tmp, oracle):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    result = small_run.run(
        a_plan("zero2", dp=16, on="2x8xh100-80gb", offload="optimizer", activation_checkpointing="full"), steps=2
    )
    assert {(o.wrapper, o.extra["stage"]) for o in result.outcomes} == {("DeepSpeedEngine", 2)}
    assert result.arguments["offload"] == "optimizer" and result.arguments["activation_checkpointing"] == "full"
    assert max(abs(a / b - 1) for a, b in zip(result.losses, oracle, strict=True)) < TOLERANCE


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (dict(ranks=0), "ranks=0: give 1 to 8"),
        (dict(ranks=9), "ranks=9: give 1 to 8"),
        (dict(steps=0), "steps=0: give a whole number"),
    ],
)
def test_bad_input(how, sentence):
    with pytest.raises(ValueError, match=sentence):
        small_run.run(a_plan(), **how)


def test_a_plan_that_nothing_here_runs():
    with pytest.raises(ValueError, match="lora under data parallelism and FSDP, not with tp=2"):
        small_run.run(a_plan("single", dp=1, tp=2, method="lora", **LLAMA))
    with pytest.raises(ValueError, match="parameters, gradients and optimizer together or not at all"):
        small_run.run(a_plan("fsdp", offload="optimizer"))
