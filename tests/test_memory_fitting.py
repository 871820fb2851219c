"""The largest batch and the longest sequence are the last that fit, for cards of every size."""

from __future__ import annotations

import pytest

from course_lib.memory import CARDS, card, estimate
from course_lib.memory.fitting import largest_micro_batch, longest_sequence, methods_that_fit

GIB = 2**30
CASES = [
    ("tiny", GIB * 2, {"precision": "fp32"}),
    ("smollm2-135m", "t4", {"precision": "fp16-mixed"}),
    ("smollm2-135m", "a100-80gb", {"attention": "eager", "activation_checkpointing": "selective"}),
    ("llama-3.1-8b", "rtx4090", {"method": "qlora", "activation_checkpointing": "full"}),
    ("llama-3.1-8b", "24GiB", {"method": "lora", "optimizer": "adamw8bit"}),
    (
        "llama-3.1-70b",
        "h100-80gb",
        {"strategy": "fsdp", "ranks": 64, "activation_checkpointing": "full", "tensor_parallel": 2},
    ),
    ("qwen3-0.6b", 20 * GIB, {"strategy": "zero2", "ranks": 4, "num_microbatches": 8}),
]


@pytest.mark.parametrize(("model", "memory", "settings"), CASES)
def test_one_more_would_not_fit(model: str, memory: int | str, settings: dict) -> None:
    room = memory if isinstance(memory, int) else card(memory).memory
    batch = largest_micro_batch(model, memory, **settings)
    assert not estimate(model, micro_batch_size=batch + 1, **settings).fits(room)
    assert not batch or estimate(model, micro_batch_size=batch, **settings).fits(room)
    length = longest_sequence(model, memory, multiple=64, **settings)
    assert length % 64 == 0
    assert not estimate(model, seq_len=length + 64, **settings).fits(room)
    assert not length or estimate(model, seq_len=length, **settings).fits(room)


def test_the_cases_are_of_every_kind() -> None:
    found = [largest_micro_batch(model, memory, **settings) for model, memory, settings in CASES]
    assert 0 in found and max(found) > 10, found


def test_a_step_finer_than_every_length_agrees_with_walking() -> None:
    room, settings = 3 * GIB, {"precision": "fp32", "micro_batch_size": 4}
    walked = max(length for length in range(8, 12_000, 8) if estimate("tiny", seq_len=length, **settings).fits(room))
    assert walked < 11_000, "the walk goes past the end"
    assert longest_sequence("tiny", room, multiple=8, **settings) == walked


def test_nothing_fits_into_less_than_the_weights() -> None:
    assert largest_micro_batch("llama-3.1-8b", "t4", precision="fp16-mixed") == 0
    assert longest_sequence("llama-3.1-8b", "t4", precision="fp16-mixed") == 0


def test_a_length_divides_by_context_parallel_and_stays_in_a_table_of_positions() -> None:
    length = longest_sequence("llama-3.1-8b", "h100-80gb", multiple=128, context_parallel=3, method="qlora")
    assert length and length % (3 * 128) == 0
    assert longest_sequence("gpt2", "h100-80gb", precision="bf16") == 1024
    assert longest_sequence("gpt2", "h100-80gb", precision="bf16", multiple=768) == 768
    assert longest_sequence("gpt2", "h100-80gb", precision="bf16", multiple=96) == 960


def test_every_method_on_a_card() -> None:
    ways = methods_that_fit("llama-3.1-8b", "rtx4090")
    assert len(ways) == len({(way.method, way.activation_checkpointing, way.optimizer) for way in ways}) == 27
    for way in ways:
        need = estimate(
            "llama-3.1-8b",
            method=way.method,
            activation_checkpointing=way.activation_checkpointing,
            optimizer=way.optimizer,
            precision=way.precision,
        )
        assert (way.peak, way.peak_phase, way.device) == (need.peak, need.peak_phase, need.device)
        assert way.fits == (need.device <= 24 * GIB)
    fitting = {way.method for way in ways if way.fits}
    assert "qlora" in fitting and "full" not in fitting, "8B full fine-tuning does not fit a 24 GiB card"


def test_the_table_takes_a_precision_that_the_card_has() -> None:
    assert {way.precision for way in methods_that_fit("smollm2-135m", "t4")} == {"fp16-mixed"}
    assert {way.precision for way in methods_that_fit("smollm2-135m", CARDS["l4"], precision="bf16")} == {"bf16"}
    offloaded = methods_that_fit("tiny", "l4", optimizers=("adamw",), strategy="zero3", ranks=2, offload="all")
    assert len(offloaded) == 9


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: largest_micro_batch("tiny", "t4"), "A t4 has no bf16: take precision='fp16-mixed', or 'fp32'."),
        (lambda: largest_micro_batch("tiny", 0), "memory=0: give a number above 0."),
        (
            lambda: largest_micro_batch("tiny", GIB, micro_batch_size=2),
            "micro_batch_size is what is looked for: leave it out.",
        ),
        (lambda: longest_sequence("tiny", GIB, seq_len=2), "seq_len is what is looked for: leave it out."),
        (lambda: longest_sequence("tiny", GIB, multiple=0), "multiple=0: give a whole number of at least 1."),
        (lambda: methods_that_fit("tiny", "l4", method="full"), "method is what the table goes through: leave it out."),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == sentence
