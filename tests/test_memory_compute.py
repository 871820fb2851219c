"""FLOPs a token, utilisation, training time and model states, against counts by hand and against each other."""

from __future__ import annotations

import pytest

from course_lib.collectives.links import bus_factor
from course_lib.memory import PRESETS, Shape, states
from course_lib.memory.compute import flops_per_token, parameter_counts
from course_lib.memory.utilization import hfu, mfu, utilization

LLAMA = "llama-3.1-8b"


@pytest.mark.parametrize(
    ("name", "total", "rest"),  # as Qwen's model cards print them, in billions
    [("qwen3-0.6b", 0.6, 0.44), ("qwen3-4b", 4.0, 3.6), ("qwen3-8b", 8.2, 6.95), ("qwen3-32b", 32.8, 31.2)],
)
def test_counts_with_and_without_embedding(name: str, total: float, rest: float) -> None:
    counts = parameter_counts(name)
    assert counts.total / 1e9 == pytest.approx(total, rel=0.01)
    assert counts.without_embedding / 1e9 == pytest.approx(rest, abs=0.006 if rest < 1 else 0.06)


def test_counts_of_a_shape_by_hand() -> None:
    # q 4x4, k and v 2x4, o 4x4; gate and up 6x4, down 4x6; two norms of 4; vocabulary 10
    matrices, norms = 16 + 2 * 8 + 16 + 3 * 24, 8
    untied = parameter_counts(Shape(2, 4, 2, 10, kv_heads=1, intermediate=6))
    assert untied.without_embedding == 2 * (matrices + norms) + 4
    assert untied.total == untied.without_embedding + 2 * 40
    assert untied.in_products == 2 * matrices + 40
    tied = parameter_counts(Shape(2, 4, 2, 10, kv_heads=1, intermediate=6, tied=True))
    assert (tied.total, tied.in_products) == (untied.total - 40, untied.in_products)


def test_flops_of_a_token_by_hand() -> None:
    """Every product of a step written out: (rows x columns) costs 2 a token, forward; the same for each gradient."""
    shape, seq = Shape(3, 8, 4, 32, kv_heads=2, head_dim=3, intermediate=20), 16
    forward_block = 2 * (8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 20)  # q, k and v, o, SwiGLU
    attention = 2 * 2 * 12 * seq  # scores and their product with v: 4 heads of 3, every key
    forward = 3 * (forward_block + attention) + 2 * 8 * 32
    assert flops_per_token(shape, seq) == 3 * forward
    assert flops_per_token(shape, seq, recompute="full") == 3 * forward + 3 * (forward_block + attention)
    assert flops_per_token(shape, seq, recompute="selective") == 3 * forward + 3 * attention
    assert flops_per_token(shape, seq, attention=False) == 3 * (forward - 3 * attention)
    assert flops_per_token(shape, seq, frozen=True) == 2 * (forward - 3 * attention) + 3 * 3 * attention
    seen = flops_per_token(shape, seq, causal=True) - flops_per_token(shape, seq, attention=False)
    assert seen == 3 * 3 * 2 * 2 * 12 * sum(range(1, seq + 1)) / seq


def test_which_parameters_count() -> None:
    counts = parameter_counts(LLAMA)
    six = {
        which: flops_per_token(LLAMA, 4096, attention=False, counted=which) / 6
        for which in ("all", "without_embedding", "matrices")
    }
    assert six == {
        "all": counts.total,
        "without_embedding": counts.without_embedding,
        "matrices": counts.in_products,
    }
    again = flops_per_token(LLAMA, 4096, attention=False, counted="without_embedding", recompute="full")
    assert again == pytest.approx(8 * counts.without_embedding, rel=1e-5), (
        "but for the last norm, blocks run four times"
    )


def test_a_utilisation_says_what_it_is() -> None:
    same = {"seq_len": 8192, "peak": "h100-80gb", "gpus": 8}
    run = mfu(LLAMA, 80_000, **same)
    assert run.value == pytest.approx(80_000 * flops_per_token(LLAMA, 8192) / 8 / 989e12)
    assert str(run) == (
        f"{100 * run.value:.1f} %: MFU, 6 FLOPs x 7,504,658,432 parameters that multiply, output layer included, attention over "
        "all keys of 8,192 tokens; peak 989 TFLOP/s a GPU (h100-80gb, dense 16-bit)"
    )
    assert hfu(LLAMA, 80_000, recompute="none", **same).value == run.value
    assert hfu(LLAMA, 80_000, recompute="selective", **same).value > run.value
    full = hfu(LLAMA, 80_000, recompute="full", causal=True, counted="all", **same)
    assert "HFU, 6 FLOPs x 8,030,261,248 parameters in all, attention over the keys in sight" in str(full)
    assert "blocks recomputed" in str(full)
    lora = mfu(LLAMA, 80_000, frozen=True, attention=False, **same)
    assert lora.value < run.value and "MFU, 4 FLOPs x" in str(lora) and "no attention" in str(lora)


def test_states_under_every_stage() -> None:
    assert [states.state_bytes(100, ranks=4, stage=stage) for stage in range(4)] == [1600, 700, 550, 400]
    assert states.state_bytes(3, ranks=2, stage=3) == 3 + 3 + 18, "a rank's share is rounded up"
    assert states.state_bytes(10, weights=4, gradients=4, states=8) == 160, "fp32 throughout"
    gathered = states.fsdp_peak_parameters([PRESETS["smollm2-135m"].block_parameters] * 30, 30)
    assert gathered == 2 * PRESETS["smollm2-135m"].block_parameters


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: flops_per_token(LLAMA, 0), "seq_len=0: give a number above 0."),
        (lambda: flops_per_token(LLAMA, 8, recompute="ful"), "recompute='ful' is no choice: did you mean 'full'?"),
        (
            lambda: flops_per_token(LLAMA, 8, counted="7B"),
            "counted='7B' is no choice: choose one of matrices, all, without_embedding.",
        ),
        (
            lambda: utilization(1e14, "24GiB"),
            "The speed of 24GiB is not known: give peak in FLOP/s, 312e12 for an A100.",
        ),
        (lambda: mfu(LLAMA, -1, seq_len=8, peak=1e14), "tokens_per_second=-1: give a number above 0."),
        (lambda: mfu(LLAMA, float("nan"), seq_len=8, peak=1e14), "tokens_per_second=nan: give a number above 0."),
        (lambda: states.state_bytes(10, stage=4), "stage=4 is no choice: choose one of 0, 1, 2, 3."),
        (lambda: states.fsdp_peak_parameters([], 2), "units is empty: give the number of elements of each FSDP unit."),
        (lambda: bus_factor("allreduce", 2), "collective='allreduce' is no choice: did you mean 'all_reduce'?"),
        (lambda: bus_factor("all_reduce", 0), "ranks=0: give a whole number of at least 1."),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == sentence
