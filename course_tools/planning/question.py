"""The question that a search answers, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from course_lib.choices import (
    ACTIVATION_CHECKPOINTING,
    AXES,
    METHODS,
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    check_choice,
)
from course_lib.memory import Shape, shape_of
from course_lib.memory.settings import check_card, check_length
from course_lib.validation import check_counts, pick, positive
from course_tools.planning.answer import adapts_attention_alone
from course_tools.planning.constants import CONSTANTS, Constants
from course_tools.planning.machines import Machines, machines

SHARING = (*STRATEGIES, "hsdp")  # with FSDP within groups of ranks, each of which has a copy of the model
SEARCHED_OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw8bit")  # the others train differently: they must be asked for
FINE_TUNING = 65_536  # tokens a step: 128 sequences of 512 trained Alpaca, 128 of up to 4,096 Tulu 3 (arXiv:2411.15124)
HEADROOM = 0.06  # of a card, for what no formula knows
MOST_FACTOR = 8  # a chosen batch may exceed its budget so many times, where each GPU then has a sequence of its own


@dataclass(frozen=True)
class Question:
    """What is asked: the arguments of `course_tools.planning.plan`, which explains them."""

    shape: Shape
    machines: Machines
    global_batch: int
    seq_len: int
    methods: tuple[str, ...] = tuple(METHODS)
    strategies: tuple[str, ...] = SHARING
    activation_checkpointing: tuple[str, ...] = ACTIVATION_CHECKPOINTING
    offload: tuple[str, ...] = OFFLOADS
    optimizers: tuple[str, ...] = SEARCHED_OPTIMIZERS
    axes: tuple[str, ...] = AXES
    sequence_parallel: bool = True
    precision: str = ""
    attention: str = "flash"
    loss: str = "eager"
    compile: bool = False
    lora_rank: int = 16
    tokens: float | None = None
    headroom: float = HEADROOM
    batch_note: str = ""
    constants: Constants = CONSTANTS

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def lora_targets(self) -> str:
        return "attention" if adapts_attention_alone(self.shape) else "all"

    @property
    def room(self) -> int:
        """Bytes of a card that a plan may take."""
        return int((1 - self.headroom) * self.machines.card.memory)


SEVERAL = {
    "methods": tuple(METHODS),
    "strategies": SHARING,
    "activation_checkpointing": ACTIVATION_CHECKPOINTING,
    "offload": OFFLOADS,
    "optimizers": OPTIMIZERS,
    "axes": AXES,
}
NAMES = tuple(field.name for field in fields(Question) if field.name != "batch_note")[2:]


def question(model: Any, cluster: str | Machines, **asked: Any) -> Question:
    """The question, or ValueError with one sentence about what is wrong with it.

    Args:
        model: whatever `course_lib.memory.shape_of` takes.
        cluster: whatever `course_tools.planning.machines` takes.
        asked: fields of `Question`; names that may be chosen from as one string or several, None for what is left open.
    """
    shape, on = shape_of(model), machines(cluster)
    for name in asked:
        pick("argument", name, NAMES)
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, known in SEVERAL.items():
        if name in asked:
            asked[name] = _several(name, asked[name], known)
    if "precision" not in asked:
        asked["precision"] = "fp32" if on.cpu else "bf16-mixed" if on.card.bf16 else "fp16-mixed"
    if "tokens" in asked:
        positive(tokens=asked["tokens"])
    asked.setdefault("methods", ("full",) if "tokens" in asked else ("lora", "qlora"))
    check_counts(seq_len=asked["seq_len"])
    check_length(shape, asked["seq_len"])
    if "global_batch" not in asked:
        shares = set(asked["methods"]) - {"qlora"} and {"cp", "pp"} & set(asked.get("axes", AXES))
        asked["global_batch"], asked["batch_note"] = chosen_batch(
            shape, on.gpus, asked["seq_len"], "tokens" in asked, bool(shares)
        )
    found = Question(shape, on, **asked)
    check_counts(global_batch=found.global_batch, lora_rank=found.lora_rank)
    if found.tokens is not None and found.tokens < found.global_batch * found.seq_len:
        raise ValueError(
            f"tokens={found.tokens:,.0f} are less than one step, which takes {found.global_batch * found.seq_len:,}."
        )
    if not 0 <= found.headroom < 1:
        raise ValueError(f"headroom={found.headroom}: give the share of a card that stays free, from 0 up to 1.")
    pick("precision", found.precision, PRECISIONS)
    check_choice("attention", found.attention)
    check_choice("loss", found.loss)
    if not on.cpu:
        check_card(found.precision, on.card)
    return found


def chosen_batch(shape: Shape, gpus: int, seq_len: int, pretraining: bool, shares: bool) -> tuple[int, str]:
    """Sequences of a step that the GPUs share out evenly, and a sentence that says why so many.

    Where several GPUs may work on one sequence (`shares`), there can be fewer sequences than GPUs.

    Fine-tuning takes FINE_TUNING tokens. Pretraining takes more for larger models: half a million at 125 million
    parameters, growing with their fourth root, which meets table 2.1 of GPT-3 (arXiv:2005.14165: 3.2 million at 175
    billion) within a factor of 1.5.
    """
    budget = 0.5e6 * (shape.parameters / 125e6) ** 0.25 if pretraining else FINE_TUNING
    wanted = budget / seq_len
    if shares and gpus > MOST_FACTOR * wanted:
        batch = max(n for n in range(1, int(MOST_FACTOR * max(wanted, 0.25)) + 1) if gpus % n == 0)
    else:
        batch = gpus * 2 ** max(round(math.log2(wanted / gpus)), 0)
    kind = f"pretraining {shape.parameters / 1e9:,.3g} billion parameters" if pretraining else "fine-tuning"
    usual = f"{budget / 1e6:,.2g} million" if pretraining else f"{budget:,}"
    return (
        batch,
        f"chosen: {batch * seq_len:,} tokens that the GPUs share out evenly; usual for {kind} are about {usual}",
    )


def _several(name: str, values: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    values = (values,) if isinstance(values, str) else tuple(values)
    if not values:
        raise ValueError(f"{name} is empty: give at least one of {', '.join(known)}.")
    for value in values:
        pick(name, value, known)
    return values
