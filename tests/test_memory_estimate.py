"""What the estimate must hold to where nothing can be measured here: sharding, tensor and pipeline parallelism, offload."""

import pytest

from course_lib.memory import PRESETS, estimate, state_bytes
from course_lib.memory.quantized import nf4_bytes

GIB = 2**30
SEVEN = PRESETS["llama-2-7b"]


def states(need):
    return need.weights + need.gradients + need.optimizer


@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_divides_what_its_paper_divides(stage, ranks):
    need = estimate(SEVEN, strategy=f"zero{stage}", ranks=ranks)
    assert states(need) == pytest.approx(state_bytes(SEVEN.parameters, ranks=ranks, stage=stage), rel=1e-5)


def test_fsdp_divides_sixteen_bytes():
    alone, eight = (estimate(SEVEN, strategy="fsdp", ranks=ranks) for ranks in (1, 8))
    assert states(alone) == pytest.approx(16 * SEVEN.parameters, rel=1e-5)
    assert states(eight) == pytest.approx(states(alone) / 8, rel=1e-5)
    assert eight.activations == alone.activations, "sharding states leaves activations alone"


def test_fsdp_gathers_units_and_not_the_model():
    need = estimate(SEVEN, strategy="fsdp", ranks=64)
    block, outer = 2 * SEVEN.block_parameters, 2 * (SEVEN.parameters - SEVEN.layers * SEVEN.block_parameters)
    assert need.buffers == pytest.approx(outer + 2 * block + block, rel=1e-6)  # this block, the next one, its gradients


def test_ddp_has_everything_on_each_rank_and_its_buckets():
    one, two = estimate(SEVEN), estimate(SEVEN, strategy="ddp", ranks=2)
    assert states(two) == states(one)
    assert two.peak - one.peak == pytest.approx(one.gradients)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallelism_divides_matrices_not_norms(t):
    one, many = estimate("llama-3.1-8b"), estimate("llama-3.1-8b", tensor_parallel=t)
    shape = PRESETS["llama-3.1-8b"]
    norms = 4 * (2 * shape.layers + 1) * shape.hidden + 4 * shape.head_dim
    assert many.weights == (one.weights - norms) // t + norms
    split = estimate("llama-3.1-8b", tensor_parallel=t, sequence_parallel=True)
    assert one.activations / t == pytest.approx(split.activations, rel=0.01) and split.activations < many.activations


def test_more_tensor_ranks_than_kv_heads_copy_them():
    eight, sixteen = (estimate("llama-3.1-8b", tensor_parallel=t) for t in (8, 16))
    assert sixteen.weights > eight.weights / 2


def test_the_fullest_pipeline_stage_is_reported():
    need = estimate(SEVEN, pipeline_parallel=4, num_microbatches=16)
    alone = estimate(SEVEN, pipeline_parallel=4, num_microbatches=1)
    assert need.activations > 3 * alone.activations, "the first stage holds a micro-batch for each stage"
    assert need.weights < estimate(SEVEN).weights / 3


def test_context_parallelism_divides_tokens():
    one, four = estimate(SEVEN, seq_len=8192), estimate(SEVEN, seq_len=8192, context_parallel=4)
    assert four.activations == pytest.approx(one.activations / 4, rel=1e-3) and four.logits == one.logits // 4


def test_offload_moves_states_then_weights():
    kept = estimate(SEVEN, strategy="zero3", ranks=4)
    states_away = estimate(SEVEN, strategy="zero3", ranks=4, offload="optimizer")
    all_away = estimate(SEVEN, strategy="zero3", ranks=4, offload="all")
    assert states_away.optimizer == states_away.gradients == 0 and states_away.weights == kept.weights
    assert all_away.weights == 0 and all_away.buffers > 0, "the units at work are still gathered"


def test_qlora_of_llama_65b_fits_where_its_paper_trained_it():
    """arXiv:2305.14314: 65B parameters on one 48 GB card."""
    need = estimate(
        "llama-65b",
        method="qlora",
        activation_checkpointing="full",
        optimizer="paged_adamw8bit",
        seq_len=512,
        lora_rank=64,
    )
    assert need.fits(48 * 10**9)
    assert not estimate("llama-65b", method="lora", activation_checkpointing="full", seq_len=512).fits(80 * GIB)


def test_bits_of_a_whole_matrix_are_the_papers():
    elements = 4096 * 11008
    assert 8 * nf4_bytes(elements) / elements == pytest.approx(4.127, abs=1e-3)  # bits: arXiv:2305.14314, section 3


def test_the_peak_is_the_worst_moment_and_not_the_sum():
    need = estimate("smollm2-135m", precision="fp32", micro_batch_size=8)
    assert need.peak == need.phases[need.peak_phase] == max(need.phases.values())
    assert need.peak < states(need) + need.activations + need.logits
    assert need.reserved.low >= need.peak and need.reserved.low <= need.reserved.expected <= need.reserved.high


def test_a_short_run_peaks_elsewhere_than_a_long_one():
    short, long = (estimate("smollm2-135m", precision="fp32", seq_len=seq_len) for seq_len in (64, 4096))
    assert short.peak_phase == "gradient of the embedding" and long.peak_phase == "backward of the loss"


def test_foreach_adamw_needs_a_copy_of_a_state():
    fused, foreach = (estimate(SEVEN, seq_len=64, step=step).phases["optimizer step"] for step in ("fused", "foreach"))
    assert foreach - fused == 4 * SEVEN.parameters


def test_every_more_costs_more():
    base = {"micro_batch_size": 2, "seq_len": 512}
    for more in ({"micro_batch_size": 3}, {"seq_len": 1024}, {"attention": "eager"}):
        assert estimate(SEVEN, **(base | more)).activations > estimate(SEVEN, **base).activations


@pytest.mark.parametrize(("strategy", "offload"), [("zero3", "optimizer"), ("zero3", "all"), ("fsdp", "all")])
def test_offloaded_gradients_are_no_part_of_the_device_s_step(strategy, offload):
    told = estimate("llama-2-7b", strategy=strategy, offload=offload, ranks=4, activation_checkpointing="full")
    beside = told.phases["optimizer step"] - told.weights
    assert told.gradients == told.optimizer == 0 and beside < 1.1e9, "a bucket of 5e8 elements is all that may be there"
