"""What means nothing gets a sentence that says what to do, never a number."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from course_lib.choices import CHOICES
from course_lib.memory import CARDS, Card, card, estimate, shape_of

LLAMA = "llama-3.1-8b"
OTHER = " A config or widths will do too."


def config(kind: str, **more: object) -> SimpleNamespace:
    return SimpleNamespace(model_type=kind, num_hidden_layers=2, hidden_size=64, vocab_size=256, **more)


REFUSED = {
    # the issue's own list
    "unknown preset": (
        ("llama-4-8b", {}),
        "No model is called 'llama-4-8b': the nearest are llama-3-8b, llama-3.1-8b, llama-2-7b." + OTHER,
    ),
    "far from any preset": (("zzz", {}), "No model is called 'zzz': the nearest are llama-3.1-8b, qwen3-0.6b." + OTHER),
    "heads": (
        (LLAMA, {"tensor_parallel": 3}),
        "llama-3.1-8b: 32 attention heads do not divide over 3 tensor-parallel ranks: take one of 1, 2, 4, 8, 16, 32 ranks.",
    ),
    "more ranks than heads": (
        (LLAMA, {"tensor_parallel": 64}),
        "llama-3.1-8b: 32 attention heads do not divide over 64 tensor-parallel ranks: take one of 1, 2, 4, 8, 16, 32 ranks.",
    ),
    "kv heads": (
        ("qwen2.5-7b", {"tensor_parallel": 7}),
        "qwen2.5-7b: 4 kv heads do not divide over 7 tensor-parallel ranks: take one of 1, 2, 4 ranks.",
    ),
    "stages": (
        (LLAMA, {"pipeline_parallel": 33}),
        "llama-3.1-8b has 32 layers: too few for pipeline_parallel=33 stages.",
    ),
    "rank 0, lora": ((LLAMA, {"method": "lora", "lora_rank": 0}), "lora_rank=0: give a whole number of at least 1."),
    "rank 0, qlora": ((LLAMA, {"method": "qlora", "lora_rank": 0}), "lora_rank=0: give a whole number of at least 1."),
    "bf16 on a T4": ((LLAMA, {"card": "t4"}), "A t4 has no bf16: take precision='fp16-mixed', or 'fp32'."),
    "bf16 on a V100": (
        (LLAMA, {"card": "V100-32GB", "precision": "bf16"}),
        "A v100-32gb has no bf16: take precision='fp16-mixed', or 'fp32'.",
    ),
    # models
    "no model": ((3, {}), "No model can be read from int: give a preset's name, a config or widths."),
    "a width is missing": (({"layers": 2}, {}), "A shape needs layers, hidden, heads and vocab: hidden is missing."),
    "a width misspelt": (({"layer": 2}, {}), "A shape has no 'layer': did you mean 'layers'?"),
    "no layers": (
        ({"layers": 0, "hidden": 64, "heads": 4, "vocab": 9}, {}),
        "layers=0: give a whole number of at least 1.",
    ),
    "half a head": (
        ({"layers": 2, "hidden": 65, "heads": 4, "vocab": 9}, {}),
        "hidden=65 does not split into heads=4: give another number of heads.",
    ),
    "uneven groups": (
        ({"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 3, "vocab": 9}, {}),
        "heads=4 is no multiple of kv_heads=3: each group needs as many.",
    ),
    "experts": (
        (config("mixtral", num_local_experts=8), {}),
        "mixtral is a mixture of experts: the course's memory model knows dense models only.",
    ),
    "no transformer": (
        (config("mamba"), {}),
        "model_type 'mamba' is not known here: give its widths, as in estimate(dict(layers=…, …)).",
    ),
    # cards
    "unknown card": (
        (LLAMA, {"card": "v100"}),
        "No card is called 'v100': the nearest are v100-16gb, v100-32gb; an amount such as 24GiB will do too.",
    ),
    # numbers
    "no batch": ((LLAMA, {"micro_batch_size": 0}), "micro_batch_size=0: give a whole number of at least 1."),
    "half a batch": ((LLAMA, {"micro_batch_size": 1.5}), "micro_batch_size=1.5: give a whole number of at least 1."),
    "a length of True": ((LLAMA, {"seq_len": True}), "seq_len=True: give a whole number of at least 1."),
    "no ranks": ((LLAMA, {"ranks": 0, "strategy": "ddp"}), "ranks=0: give a whole number of at least 1."),
    # combinations
    "several ranks alone": (
        (LLAMA, {"ranks": 2}),
        "ranks=2 with strategy='single': several ranks need ddp, zero1, zero2, zero3 or fsdp.",
    ),
    "a length in thirds": ((LLAMA, {"context_parallel": 3}), "seq_len=2048 does not divide by context_parallel=3."),
    "offload alone": (
        (LLAMA, {"offload": "optimizer"}),
        "offload='optimizer' puts the optimizer on the host, which zero1, zero2 or zero3 can do and single cannot.",
    ),
    "offload of whole weights": (
        (LLAMA, {"offload": "all", "strategy": "zero2", "ranks": 2}),
        "offload='all' puts weights on the host, which zero3 or fsdp can do and zero2 cannot.",
    ),
    "FSDP2's optimizer alone": (
        (LLAMA, {"offload": "optimizer", "strategy": "fsdp", "ranks": 2}),
        "offload='optimizer': FSDP2 offloads parameters, gradients and optimizer together or not at all; "
        "give offload='all' or 'none'.",
    ),
    "4 bits in parts": (
        (LLAMA, {"method": "qlora", "tensor_parallel": 2}),
        "bitsandbytes keeps each quantized matrix in one piece, and tp=2 would split it: with qlora take tp=1.",
    ),
    "8 bits on the host": (
        (LLAMA, {"offload": "all", "strategy": "fsdp", "ranks": 2, "optimizer": "adamw8bit"}),
        "optimizer='adamw8bit' has no CPU step: with offload take adamw.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_sentence_in_the_place_of_a_number(case: str) -> None:
    (model, settings), sentence = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        estimate(model, **settings)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", sorted(set(CHOICES) & set(inspect.signature(estimate).parameters)))
def test_every_choice_is_checked(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        estimate("tiny", **{name: "#"})
    assert str(caught.value) == f"{name}='#' is no choice: choose one of {', '.join(CHOICES[name])}."
    typo = CHOICES[name][0] + "x"
    with pytest.raises(ValueError, match=f"{name}='{typo}' is no choice: did you mean '"):
        estimate("tiny", **{name: typo})


def test_every_choice_is_taken_somewhere() -> None:
    """No value of CHOICES is refused with every other choice as usual, but for those that need sharding."""
    for name in set(CHOICES) & set(inspect.signature(estimate).parameters):
        for value in CHOICES[name]:
            around = {"strategy": "zero3", "ranks": 2} if name == "offload" else {}
            around |= {"ranks": 2} if name == "strategy" and value != "single" else {}
            assert estimate("tiny", **{name: value} | around).peak > 0


def test_nf4_is_no_way_to_train_all_weights() -> None:
    with pytest.raises(ValueError, match="weights in 4 bits cannot be trained themselves: that is method='qlora'"):
        estimate(LLAMA, method="full", precision="nf4")
    with pytest.raises(ValueError, match="method='full-qlora' is no choice"):
        estimate(LLAMA, method="full-qlora")


def test_a_card_is_any_amount_too() -> None:
    assert card("24GiB").memory == 24 * 2**30 and card(" 24 GB ").memory == 24 * 10**9
    assert card("A100-80GB") is CARDS["a100-80gb"] and isinstance(card(CARDS["t4"]), Card)
    for wrong in ("0GiB", "24", "GiB", ""):
        with pytest.raises(ValueError, match="No card is called "):
            card(wrong)


def test_names_as_people_write_them() -> None:
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B", "llama-3.1-8b", "meta-llama/Meta-Llama-3-8B"):
        assert shape_of(name).layers == 32
    assert shape_of("Qwen/Qwen3-0.6B-Base") is shape_of("qwen3-0.6b")
    assert shape_of("HuggingFaceTB/SmolLM2-135M") is shape_of("smollm2-135m")
