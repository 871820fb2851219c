"""What practitioners ask, and which first answers an experienced colleague would give.

The answers were written down without a look at the planner, from bytes per parameter and from custom, and say what is right
beside the one best: where the arithmetic is tight, more than one method or strategy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from course_tools.planning import Plan, machines, plan

GIB = 2**30
FULL = {"methods": "full"}
SHARDED = ("fsdp", "zero3")
STATES = (*SHARDED, "zero2", "zero1")
COPIES = ("ddp", "zero1", "zero2")


class Right(NamedTuple):
    """What may come first. `tp`, `pp`, `cp`, `ep`: the most ranks; `split`: least tp x cp. `tokens`: of a step."""

    methods: tuple[str, ...]
    strategies: tuple[str, ...] = ("single",)
    tokens: tuple[int, int] = (8_192, 262_144)
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    split: int = 1
    offload: tuple[str, ...] = ("none",)
    checkpointing: tuple[str, ...] = ("none", "selective", "full")


LORA, QLORA, EITHER = ("lora",), ("qlora",), ("lora", "qlora")
ALL = ("full",)
LARGE = (32_768, 1_048_576)
QUESTIONS: list[tuple[str, str, dict[str, Any], Right]] = [
    ("llama-3.1-8b", "rtx4090", {}, Right(EITHER)),
    ("llama-3.1-8b", "2xrtx3090", {}, Right(EITHER, COPIES)),
    ("mistral-7b", "4xt4", {"seq_len": 1024}, Right(QLORA, COPIES)),
    ("llama-3.1-70b", "2xrtx3090", {"seq_len": 1024}, Right(QLORA, SHARDED, offload=("all",), checkpointing=("full",))),
    ("llama-3.1-8b", "8xa100-40gb", {**FULL, "seq_len": 4096}, Right(ALL, (*SHARDED, "zero2"), LARGE)),
    ("llama-2-13b", "16xv100-32gb", FULL, Right(ALL, SHARDED, LARGE)),
    ("llama-3.1-70b", "64xh100", {**FULL, "seq_len": 32_768}, Right(ALL, SHARDED, (262_144, 8_388_608), 8, 1, 8, split=2)),
    ("llama-3.1-70b", "96xh100", {**FULL, "seq_len": 4096}, Right(ALL, SHARDED, (49_152, 8_388_608), tp=8)),
    ("llama-3.1-8b", "3xa100-80gb", FULL, Right(ALL, STATES)),
    ("smollm2-135m", "2xcpu", {**FULL, "seq_len": 512}, Right(ALL, ("ddp",), checkpointing=("none",))),
    ("qwen3-30b-a3b", "8xh200", {**FULL, "seq_len": 4096}, Right(ALL, STATES, LARGE, tp=2, ep=8)),
    ("qwen3-30b-a3b", "h100", {}, Right(LORA)),
    ("llama-3.1-405b", "8xh100", {}, Right(QLORA, SHARDED, checkpointing=("full",))),
    ("llama-3.1-405b", "16384xh100", {"tokens": 15.6e12, "seq_len": 8192}, Right(ALL, STATES, (2**22, 2**25), 8, 18, 2, split=8)),
    ("llama-3.1-8b", "8xh100", {"tokens": 1e12, "seq_len": 4096}, Right(ALL, STATES, (262_144, 8_388_608))),
    ("qwen2.5-7b", "a100-40gb", {}, Right(LORA)),
    ("qwen2.5-32b", "h100", {}, Right(EITHER)),
    ("llama-3.1-70b", "4xa100-80gb", {"methods": "lora"}, Right(LORA, SHARDED)),
    ("llama-3.1-70b", "h100", {}, Right(QLORA)),
    ("mistral-7b", "rtx4090", {**FULL, "host": 128 * GIB}, Right(ALL, STATES, offload=("optimizer",), checkpointing=("full",))),
    ("llama-3.2-1b", "rtx3090", FULL, Right(ALL)),
    ("llama-3.1-8b", "2xa100-80gb", FULL, Right(ALL, (*SHARDED, "zero2"))),
    ("llama-3.1-8b", "8xh100", {**FULL, "seq_len": 131_072}, Right(ALL, (*STATES, "single"), (131_072, 2**23), 8, 1, 8, split=4)),
    ("mixtral-8x7b", "16xa100-80gb", {**FULL, "seq_len": 4096}, Right(ALL, SHARDED, LARGE, tp=2, ep=8)),
    ("llama-3.1-8b", "l4", {}, Right(EITHER)),
    ("llama-2-7b", "8xv100-16gb", FULL, Right(ALL, SHARDED, tp=8, offload=("none", "optimizer"), checkpointing=("full",))),
    ("llama-3.1-8b", "4xa10g", {"seq_len": 4096}, Right(QLORA, COPIES)),
    ("gpt2", "8xa100-40gb", {"tokens": 300e9, "seq_len": 1024}, Right(ALL, ("ddp", "zero1"), (131_072, 2**21), checkpointing=("none",))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "cards", "asked", "right"), QUESTIONS, ids=[f"{one[0]} on {one[1]}" for one in QUESTIONS]
)
def test_the_first_answer_is_one_that_an_expert_would_give(
    model: str, cards: str, asked: dict[str, Any], right: Right
) -> None:
    asked = {"seq_len": 2048} | asked
    on = machines(cards, host_memory=asked.pop("host", None))
    best: Plan = plan(model, on, **asked).best
    assert best.method in right.methods and best.strategy in right.strategies, best
    assert best.offload in right.offload and best.activation_checkpointing in right.checkpointing, best
    assert all(getattr(best, axis) <= getattr(right, axis) for axis in ("tp", "pp", "cp", "ep")), best
    assert best.tp * best.cp >= right.split, best
    assert right.tokens[0] <= best.global_batch * best.seq_len <= right.tokens[1], best
    assert best.gpus == on.gpus and best.memory_bytes <= 0.94 * on.card.memory, best
    if not on.card.bf16 and not on.cpu:
        assert best.precision == "fp16-mixed", best
