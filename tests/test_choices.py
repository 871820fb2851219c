"""The one table of choices: what goes together, and the sentence where it does not."""

from __future__ import annotations

import itertools

import pytest

from course_lib.choices import (
    CHOICES,
    OFFLOADS,
    STRATEGIES,
    Widths,
    check_choice,
    check_combination,
    check_schedule,
    tensor_parallel_degrees,
    why_not,
    why_not_tensor_parallel,
)

TINY = Widths(heads=4, kv_heads=2, intermediate=352, vocab=256)
QWEN = Widths(heads=28, kv_heads=4, intermediate=18944, vocab=152064)

NOT_TOGETHER = {
    "FSDP2 offloads all or nothing": (
        {"strategy": "fsdp", "offload": "optimizer"},
        "offload='optimizer': FSDP2 offloads parameters, gradients and optimizer together or not at all; "
        "give offload='all' or 'none'.",
    ),
    "DDP offloads nothing": (
        {"strategy": "ddp", "offload": "optimizer", "ranks": 2},
        "offload='optimizer' puts the optimizer on the host, which zero1, zero2 or zero3 can do and ddp cannot.",
    ),
    "whole weights stay": (
        {"strategy": "zero2", "offload": "all", "ranks": 2},
        "offload='all' puts weights on the host, which zero3 or fsdp can do and zero2 cannot.",
    ),
    "8 bits on the host": (
        {"strategy": "fsdp", "offload": "all", "optimizer": "adamw8bit"},
        "optimizer='adamw8bit' has no CPU step: with offload take adamw.",
    ),
    "several ranks alone": (
        {"ranks": 2},
        "ranks=2 with strategy='single': several ranks need ddp, zero1, zero2, zero3 or fsdp.",
    ),
    "DeepSpeed's pipeline": (
        {"strategy": "zero3", "pp": 4},
        "DeepSpeed's pipeline takes no zero3: with pp=4 take zero1 without offload, ddp or fsdp.",
    ),
    "its offload": (
        {"strategy": "zero1", "offload": "optimizer", "pp": 4},
        "DeepSpeed's pipeline takes no offload='optimizer': with pp=4 take zero1 without offload, ddp or fsdp.",
    ),
    "4 bits in parts": (
        {"method": "qlora", "tp": 2},
        "bitsandbytes keeps each quantized matrix in one piece, and tp=2 would split it: with qlora take tp=1.",
    ),
}


@pytest.mark.parametrize("case", NOT_TOGETHER)
def test_what_does_not_go_together_gets_a_sentence(case: str) -> None:
    choices, sentence = NOT_TOGETHER[case]
    assert why_not(**choices) == sentence
    with pytest.raises(ValueError) as caught:
        check_combination(**choices)
    assert str(caught.value) == sentence


def test_each_strategy_offloads_what_it_shards() -> None:
    for strategy, offload in itertools.product(STRATEGIES, OFFLOADS):
        goes = not why_not(strategy=strategy, offload=offload)
        assert goes == (offload in STRATEGIES[strategy].offloads)
        if offload != "none" and goes:
            assert ("weights" if offload == "all" else "optimizer") in STRATEGIES[strategy].shards


def test_every_choice_is_checked() -> None:
    for name, values in CHOICES.items():
        for value in values:
            check_choice(name, value)
        with pytest.raises(ValueError, match=f"{name}='{values[0]}x' is no choice: did you mean '"):
            check_choice(name, values[0] + "x")
    with pytest.raises(ValueError, match="weights in 4 bits cannot be trained themselves: that is method='qlora'"):
        check_choice("precision", "nf4")


def test_tensor_parallelism_needs_equal_parts() -> None:
    assert not why_not_tensor_parallel(TINY, 2)
    assert why_not_tensor_parallel(TINY, 4) == (
        "2 kv heads do not divide over 4 tensor-parallel ranks: take one of 1, 2 ranks."
    )
    assert not why_not_tensor_parallel(TINY, 4, repeat_kv_heads=True)
    assert tensor_parallel_degrees(TINY) == [1, 2] and tensor_parallel_degrees(TINY, repeat_kv_heads=True) == [1, 2, 4]
    assert "4 kv heads" in why_not_tensor_parallel(QWEN, 7, repeat_kv_heads=True)
    assert "32,000 tokens of the vocabulary" in why_not_tensor_parallel(Widths(12, 12, 48, 32_000), 3)
    assert "or pad the vocabulary to 32,001." in why_not_tensor_parallel(Widths(12, 12, 48, 32_000), 3)
    with pytest.raises(ValueError, match="tp=0: give a whole number of at least 1"):
        why_not_tensor_parallel(TINY, 0)


def test_schedules_and_their_numbers() -> None:
    check_schedule("1f1b", 4, 3)
    check_schedule("interleaved", 4, 8, 2)
    refused = {
        ("interleave", 4, 8, 2): "did you mean 'interleaved'",
        ("interleaved", 4, 8, 1): "is '1f1b'; give at least 2",
        ("interleaved", 4, 6, 2): "not a multiple of the 4 ranks.*take 8",
        ("gpipe", 4, 8, 2): "one stage per rank; take schedule='interleaved'",
        ("1f1b", 0, 8, 1): "stages=0: give a whole number of at least 1",
    }
    for numbers, words in refused.items():
        with pytest.raises(ValueError, match=words):
            check_schedule(*numbers)
