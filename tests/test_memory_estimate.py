"""`estimate` where nothing can be measured here (sharding, tensor and pipeline parallelism, offload), what fits a card,
and what is refused."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from refusals import assert_refused

from course_lib.choices import CHOICES
from course_lib.memory import CARDS, PRESETS, card, estimate, shape_of, state_bytes
from course_lib.memory.fitting import largest_micro_batch, longest_sequence

GIB = 2**30
SEVEN = PRESETS["llama-2-7b"]
LLAMA = "llama-3.1-8b"


def states(need):
    return need.weights + need.gradients + need.optimizer


def test_states_are_divided_as_the_zero_paper_says() -> None:
    for stage, strategy in ((1, "zero1"), (2, "zero2"), (3, "zero3"), (3, "fsdp")):
        alone = estimate(SEVEN, strategy=strategy, ranks=1)
        for ranks in (3, 64):
            need = estimate(SEVEN, strategy=strategy, ranks=ranks)
            expected = state_bytes(SEVEN.parameters, ranks=ranks, stage=stage)
            assert states(need) == pytest.approx(expected, rel=1e-5), (strategy, ranks)
            assert need.activations == alone.activations, "sharding states leaves activations alone"


def test_bf16_moments_take_two_bytes_each_beside_weights_of_any_dtype() -> None:
    for precision in ("fp32", "bf16-mixed", "bf16"):
        need = estimate(SEVEN, precision=precision, optimizer="adamw_bf16")
        assert need.optimizer == pytest.approx(4 * SEVEN.parameters, rel=1e-6), precision


def test_fsdp_gathers_units_and_not_the_model() -> None:
    need = estimate(SEVEN, strategy="fsdp", ranks=64)
    block, outer = 2 * SEVEN.block_parameters, 2 * (SEVEN.parameters - SEVEN.layers * SEVEN.block_parameters)
    assert need.buffers == pytest.approx(outer + 2 * block + block, rel=1e-6)  # this block, the next one, its gradients


def test_ddp_adds_its_buckets_and_divides_nothing() -> None:
    alone, two = estimate(SEVEN), estimate(SEVEN, strategy="ddp", ranks=2)
    assert states(two) == states(alone)
    assert two.peak - alone.peak == pytest.approx(alone.gradients)


def test_tensor_parallelism_divides_matrices_not_norms() -> None:
    alone, shape = estimate(LLAMA), PRESETS[LLAMA]
    norms = 4 * (2 * shape.layers + 1) * shape.hidden + 4 * shape.head_dim
    for ranks in (2, 8):
        many = estimate(LLAMA, tensor_parallel=ranks)
        assert many.weights == (alone.weights - norms) // ranks + norms
        split = estimate(LLAMA, tensor_parallel=ranks, sequence_parallel=True)
        assert alone.activations / ranks == pytest.approx(split.activations, rel=0.01)
        assert split.activations < many.activations


def test_the_fullest_pipeline_stage_is_reported() -> None:
    many, single = (estimate(SEVEN, pipeline_parallel=4, num_microbatches=number) for number in (16, 1))
    assert many.activations > 3 * single.activations, "the first stage holds a micro-batch for each stage"
    assert many.weights < estimate(SEVEN).weights / 3


def test_context_parallelism_divides_tokens() -> None:
    alone, four = (estimate(SEVEN, seq_len=8192, context_parallel=ranks) for ranks in (1, 4))
    assert four.activations == pytest.approx(alone.activations / 4, rel=1e-3) and four.logits == alone.logits // 4


def test_offload_moves_states_then_weights() -> None:
    kept = estimate(SEVEN, strategy="zero3", ranks=4)
    for strategy, offload, weights in (("zero3", "optimizer", kept.weights), ("zero3", "all", 0), ("fsdp", "all", 0)):
        need = estimate(SEVEN, strategy=strategy, ranks=4, offload=offload, activation_checkpointing="full")
        assert (need.gradients, need.optimizer, need.weights) == (0, 0, weights), (strategy, offload)
        assert need.buffers > 0, "the units at work are still gathered"
        beside = need.phases["optimizer step"] - need.weights
        assert beside < 1.1e9, "a bucket of 5e8 elements is all that the device holds in the step"


def test_the_peak_is_the_worst_moment_and_not_the_sum() -> None:
    need = estimate("smollm2-135m", precision="fp32", micro_batch_size=8)
    assert need.peak == need.phases[need.peak_phase] == max(need.phases.values())
    assert need.peak < states(need) + need.activations + need.logits
    assert need.cuda_context > 0 and need.reserved.low <= need.device - need.cuda_context <= need.reserved.expected
    assert need.peak <= need.reserved.low <= need.reserved.expected <= need.reserved.high
    assert estimate(LLAMA, loss="fused").logits == 0 < estimate(LLAMA, eval_micro_batch_size=1).logits
    fused, foreach = (estimate(SEVEN, step=step).phases["optimizer step"] for step in ("fused", "foreach"))
    assert foreach - fused == 4 * SEVEN.parameters, "foreach AdamW makes a copy of a state"
    short, long = (estimate("smollm2-135m", precision="fp32", seq_len=tokens) for tokens in (64, 4096))
    assert (short.peak_phase, long.peak_phase) == ("gradient of the embedding", "backward of the loss")


FITTING = [
    ("tiny", 2 * GIB, {"precision": "fp32"}),
    ("smollm2-135m", "a100-80gb", {"attention": "eager", "activation_checkpointing": "selective"}),
    (LLAMA, "rtx4090", {"method": "qlora", "activation_checkpointing": "full"}),
    (LLAMA, "24GiB", {"optimizer": "adamw8bit"}),  # not even one
    ("llama-3.1-70b", "h100-80gb", {"strategy": "fsdp", "ranks": 64, "activation_checkpointing": "full"}),
]


def test_one_sequence_or_64_tokens_more_would_not_fit() -> None:
    batches = []
    for model, memory, settings in FITTING:
        room = memory if isinstance(memory, int) else card(memory).memory
        batch = largest_micro_batch(model, memory, **settings)
        assert not estimate(model, micro_batch_size=batch + 1, **settings).fits(room), (model, memory)
        assert not batch or estimate(model, micro_batch_size=batch, **settings).fits(room), (model, memory)
        length = longest_sequence(model, memory, multiple=64, **settings)
        assert length % 64 == 0
        assert not estimate(model, seq_len=length + 64, **settings).fits(room), (model, memory)
        assert not length or estimate(model, seq_len=length, **settings).fits(room), (model, memory)
        batches.append(batch)
    assert 0 in batches and max(batches) > 10, "the cases are of every kind"


def test_a_length_divides_by_context_parallel_and_stays_in_a_table_of_positions() -> None:
    length = longest_sequence(LLAMA, "h100-80gb", multiple=128, context_parallel=3, method="qlora")
    assert length and length % (3 * 128) == 0
    for multiple, expected in ((128, 1024), (768, 768), (96, 960)):
        assert longest_sequence("gpt2", "h100-80gb", precision="bf16", multiple=multiple) == expected


def test_names_and_cards_as_people_write_them() -> None:
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B", "meta-llama/Meta-Llama-3-8B"):
        assert shape_of(name).layers == 32, name
    assert shape_of("Qwen/Qwen3-0.6B-Base") is shape_of("qwen3-0.6b")
    assert card("24GiB").memory == 24 * GIB and card(" 24 GB ").memory == 24 * 10**9
    assert card("A100-80GB") is CARDS["a100-80gb"] and card("h100") is CARDS["h100-80gb"]


WIDTHS = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 256}  # of a config
REFUSED = [
    ("llama-4-8b", {}, "llama-3-8b"),  # the nearest
    (3, {}, "int"),
    ({"layers": 2}, {}, "hidden"),
    ({"layer": 2}, {}, "'layers'"),
    ({"layers": 2, "hidden": 64, "heads": 4, "vocab": 9, "experts": 4}, {}, "experts=4"),
    ({"model_type": "gemma3", "text_config": "a"}, {}, "text_config"),
    ("", {}, "No model"),
    ({"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 3, "vocab": 9}, {}, "kv_heads=3"),
    (SimpleNamespace(model_type="mamba", to_dict=lambda: {"model_type": "mamba"} | WIDTHS), {}, "mamba"),
    (LLAMA, {"card": "v100"}, "v100-16gb"),
    (LLAMA, {"card": "t4"}, "t4"),  # bf16
    (LLAMA, {"micro_batch_size": 1.5}, "micro_batch_size=1.5"),
    (LLAMA, {"method": "lora", "lora_rank": 0}, "lora_rank=0"),
    (LLAMA, {"ranks": 2}, "ranks=2"),
    (LLAMA, {"tensor_parallel": 3}, "32 attention heads"),
    ("qwen2.5-7b", {"tensor_parallel": 7}, "4 kv heads"),
    (LLAMA, {"pipeline_parallel": 33}, "pipeline_parallel=33"),
    (LLAMA, {"tensor_parallel": 16}, "8 kv heads"),
    (LLAMA, {"context_parallel": 3}, "context_parallel=3"),
    (LLAMA, {"virtual_stages": 2}, "pipeline_parallel"),
    (LLAMA, {"sequence_parallel": True}, "tensor_parallel"),
    (LLAMA, {"strategy": "fsdp", "ranks": 2, "expert_parallel": 2}, "no mixture"),
    ("mixtral-8x7b", {"strategy": "fsdp", "ranks": 6, "expert_parallel": 3}, "8 experts"),
    ("mixtral-8x7b", {"strategy": "zero3", "ranks": 8, "expert_parallel": 8}, "DeepSpeed"),
    (LLAMA, {"offload": "all", "strategy": "zero2", "ranks": 2}, "zero2"),
    (LLAMA, {"offload": "optimizer", "strategy": "fsdp", "ranks": 2}, "FSDP2"),
    (LLAMA, {"offload": "all", "strategy": "fsdp", "ranks": 2, "optimizer": "adamw8bit"}, "adamw8bit"),
    (LLAMA, {"method": "qlora", "tensor_parallel": 2}, "tp=2"),
    (LLAMA, {"reduce_each_micro_batch": True, "strategy": "zero3", "ranks": 2}, "reduce_each_micro_batch"),
    (LLAMA, {"precision": "nf4"}, "method='qlora'"),
]


def test_what_means_nothing_is_refused() -> None:
    assert_refused(
        (lambda model=model, settings=settings: estimate(model, **settings), ValueError, fragment)
        for model, settings, fragment in REFUSED
    )
    assert_refused(
        (lambda name=name: estimate("tiny", **{name: "#"}), ValueError, f"{name}='#'")
        for name in set(CHOICES) & set(inspect.signature(estimate).parameters)
    )
    assert_refused(
        [
            (lambda: largest_micro_batch("tiny", "t4"), ValueError, "t4"),
            (lambda: largest_micro_batch("tiny", 0), ValueError, "memory=0"),
            (lambda: largest_micro_batch("tiny", GIB, micro_batch_size=2), ValueError, "micro_batch_size"),
            (lambda: longest_sequence("tiny", GIB, seq_len=2), ValueError, "seq_len"),
        ]
    )
