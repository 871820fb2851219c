"""Published trainings as questions to the planner: who trained what, on what, split how, and how fast.

Each case asks with the tools that its authors had (`asked`), so that their choice is held against what they could choose
from. What they do not print is left to the planner: `predicted` takes the fastest variant of their grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from course_lib.memory import flops_per_token
from course_lib.parallel.grid import Grid
from course_tools.planning.answer import NoPlan, Plan
from course_tools.planning.constants import CONSTANTS, Constants
from course_tools.planning.question import Question, question
from course_tools.planning.search import best_of


@dataclass(frozen=True)
class Case:
    """One published training.

    Attributes:
        model, machines: names that the planner reads. global_batch: sequences a step. seq_len: tokens a sequence.
        grid: their ranks along each axis.
        asked: arguments of `plan`: what their software could do. fixed: what else they print (see `best_of`).
        percent: their utilisation of the card's dense 16-bit peak, in percent; None where they print none.
        counted: how they count FLOPs, arguments of `course_lib.memory.flops_per_token`.
        source: where it is printed.
    """

    model: str
    machines: str
    global_batch: int
    seq_len: int
    grid: Grid
    asked: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    percent: float | None = None
    counted: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def question(self, constants: Constants = CONSTANTS) -> Question:
        return question(
            self.model,
            self.machines,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            constants=constants,
            **self.asked,
        )

    def predicted(self, constants: Constants = CONSTANTS) -> Plan:
        """The planner's figures for their grid. Raises NoPlan where no variant of it fits."""
        made, _ = best_of(self.question(constants), self.grid, **self.fixed)
        if made is None:
            raise NoPlan(f"No variant of {self.grid} fits {self.machines}.", 0, None, ())
        return made

    def percent_of(self, plan: Plan) -> float:
        """A plan's utilisation, in percent, counted as they count."""
        each = flops_per_token(plan.model, self.seq_len, **self.counted)
        return 100 * each * plan.tokens_per_second / plan.gpus / plan.machines.card.peak_flops


FULL = {"methods": ("full",), "offload": ("none",)}
THREE_AXES = ("pp", "dp", "tp")
# Megatron-LM of 2021: DDP, whole blocks recomputed, unfused attention, no sequence or context parallelism, interleaved 1F1B
MEGATRON = FULL | {
    "strategies": ("single", "ddp"),
    "activation_checkpointing": ("full",),
    "attention": "eager",
    "axes": THREE_AXES,
    "sequence_parallel": False,
}
# Megatron-LM of 2022: sequence parallelism and selective recomputation on top
KORTHIKANTI = FULL | {"strategies": ("single", "ddp"), "attention": "eager", "axes": THREE_AXES}
# DeepSpeed's pipeline of 2023: ZeRO-1, plain 1F1B; sequence parallelism broke it (deepspeedai/DeepSpeed issue 4196)
LLM_JP = FULL | {
    "strategies": ("single", "zero1"),
    "activation_checkpointing": ("none", "full"),
    "axes": THREE_AXES,
    "sequence_parallel": False,
    "interleave": False,
}
# FSDP alone, Accelerate, PEFT: data parallelism, sharded or not
ACCELERATE = {"axes": ("dp",)}

# model, GPUs, sequences a step, TP, PP, percent: table 1 of arXiv:2104.04473, hardware FLOPs with everything recomputed
_TABLE_1 = (
    ("megatron-1.7b", 32, 512, 1, 1, 44),
    ("megatron-3.6b", 64, 512, 2, 1, 44),
    ("megatron-7.5b", 128, 512, 4, 1, 46),
    ("megatron-18.4b", 256, 1024, 8, 1, 43),
    ("megatron-39.1b", 512, 1536, 8, 2, 44),
    ("megatron-76.1b", 1024, 1792, 8, 4, 45),
    ("megatron-145.6b", 1536, 2304, 8, 8, 47),
    ("megatron-310.1b", 1920, 2160, 8, 16, 50),
    ("megatron-529.6b", 2520, 2520, 8, 35, 52),
    ("megatron-1008b", 3072, 3072, 8, 64, 52),
)
# model, GPUs, sequences a step, micro-batch, TP, PP, chunks, percent: tables 3 and 5 of arXiv:2205.05198, model FLOPs
_TABLE_5 = (
    ("korthikanti-22b", 8, 4, 4, 8, 1, 1, 41.5),
    ("gpt3-175b", 64, 64, 1, 8, 8, 3, 51.4),
    ("megatron-529.6b", 280, 280, 1, 8, 35, 3, 56.0),
    ("megatron-1008b", 512, 512, 1, 8, 64, 1, 56.3),
)
# GPUs, tokens a sequence, DP, TP, PP, CP, sequences a DP rank, percent: table 4 of arXiv:2407.21783
_TABLE_4 = (
    (8192, 8192, 64, 8, 16, 1, 32, 43),
    (16384, 8192, 128, 8, 16, 1, 16, 41),
    (16384, 131072, 8, 8, 16, 16, 16, 38),
)


def _cases() -> dict[str, Case]:
    found = {}
    for model, gpus, batch, tp, pp, percent in _TABLE_1:
        found[model] = Case(
            model,
            f"{gpus // 8}x8xa100-80gb",
            batch,
            2048,
            Grid(dp=gpus // tp // pp, tp=tp, pp=pp),
            MEGATRON,
            {},
            percent,
            {"recompute": "full"},
            "arXiv:2104.04473, table 1",
        )
    for model, gpus, batch, micro_batch, tp, pp, chunks, percent in _TABLE_5:
        fixed = {"micro_batch_size": micro_batch, "virtual_stages": chunks, "activation_checkpointing": "selective"}
        name = {"gpt3-175b": "175b", "megatron-529.6b": "530b", "megatron-1008b": "1t"}.get(model, "22b")
        found[f"korthikanti-{name}"] = Case(
            model,
            f"{gpus // 8}x8xa100-80gb",
            batch,
            2048,
            Grid(tp=tp, pp=pp),
            KORTHIKANTI,
            fixed,
            percent,
            {},
            "arXiv:2205.05198, tables 3 and 5",
        )
    for gpus, length, dp, tp, pp, cp, each, percent in _TABLE_4:
        # their own count of FLOPs is not printed; at 131,072 tokens only attention over the keys in sight makes 38 % possible
        found[f"llama-3-{gpus}-{length}"] = Case(
            "llama-3.1-405b",
            f"{gpus // 8}x8xh100-80gb",
            dp * each,
            length,
            Grid(dp=dp, tp=tp, pp=pp, cp=cp),
            FULL,
            {},
            percent,
            {"causal": True},
            "arXiv:2407.21783, table 4",
        )
    for micro_batch, percent in ((1, 55), (2, 60)):
        found[f"fsdp-175b-{micro_batch}"] = Case(
            "gpt3-175b",
            "32x8xa100-80gb",
            256 * micro_batch,
            2048,
            Grid(dp=256),
            FULL | ACCELERATE | {"strategies": ("fsdp",), "attention": "eager"},
            {"micro_batch_size": micro_batch, "activation_checkpointing": "full"},
            percent,
            {"recompute": "full"},
            "arXiv:2304.11277, section 5.4 (128 to 512 GPUs; 256 here)",
        )
    scripts = "llm-jp/Megatron-DeepSpeed on GitHub"
    found["llm-jp-13b"] = Case(
        "llm-jp-13b",
        "12x8xa100-40gb",
        1536,
        2048,
        Grid(dp=12, pp=8),
        LLM_JP,
        {"micro_batch_size": 1},
        source=f"{scripts}, run_train_ds_gpt_v101_fattn_nfs_0825_all_fold.sh",
    )
    found["llm-jp-175b"] = Case(  # as its script has it: TP 4, where a talk prints 2
        "gpt3-175b",
        "49x8xa100-40gb",
        1536,
        2048,
        Grid(dp=2, tp=4, pp=49),
        LLM_JP,
        {"micro_batch_size": 2},
        source=f"{scripts}, scripts/abci/175B/49node/dp2_tp4_pp49_zero1_flash_attn_rottary_bf16_50K.sh",
    )
    azure = "an article on fine-tuning with Azure ML; its batch is not printed"
    found["14b-zero3"] = Case("qwen2.5-14b", "4xa100-80gb", 16, 2048, Grid(dp=4), FULL, source=azure)
    found["70b-lora"] = Case(
        "llama-2-70b", "4x8xv100-32gb", 64, 2048, Grid(dp=32), ACCELERATE | {"methods": ("lora",)}, source=azure
    )
    for nodes in (1, 2, 3):
        found[f"8b-lora-{nodes}"] = Case(
            "llama-3.1-8b",
            f"{nodes}x8xa100-80gb",
            24 * nodes,
            2048,
            Grid(dp=8 * nodes),
            {"methods": ("lora",), "strategies": ("ddp", "zero1", "zero2", "zero3", "fsdp")},
            source=azure,
        )
    return found


CASES: dict[str, Case] = _cases()
