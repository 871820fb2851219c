"""The question that a search answers, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from course_lib.choices import ACTIVATION_CHECKPOINTING, AXES, METHODS, OFFLOADS, PRECISIONS, STRATEGIES, check_choice
from course_lib.memory import Shape, shape_of
from course_lib.memory.settings import check_card, check_length
from course_lib.validation import check_counts, pick, positive
from course_tools.planning.constants import CONSTANTS, Constants
from course_tools.planning.machines import Machines, machines


@dataclass(frozen=True)
class Question:
    """What is asked: the arguments of `course_tools.planning.plan`, which explains them."""

    shape: Shape
    machines: Machines
    global_batch: int
    seq_len: int
    methods: tuple[str, ...] = tuple(METHODS)
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    activation_checkpointing: tuple[str, ...] = ACTIVATION_CHECKPOINTING
    offload: tuple[str, ...] = OFFLOADS
    axes: tuple[str, ...] = AXES
    sequence_parallel: bool = True
    interleave: bool = True
    precision: str = ""
    attention: str = "flash"
    lora_rank: int = 16
    tokens: float | None = None
    constants: Constants = CONSTANTS

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2


SEVERAL = {
    "methods": tuple(METHODS),
    "strategies": tuple(STRATEGIES),
    "activation_checkpointing": ACTIVATION_CHECKPOINTING,
    "offload": OFFLOADS,
    "axes": AXES,
}
NAMES = tuple(field.name for field in fields(Question))[2:]


def question(model: Any, cluster: str | Machines, **asked: Any) -> Question:
    """The question, or ValueError with one sentence about what is wrong with it.

    Args:
        model: whatever `course_lib.memory.shape_of` takes.
        cluster: whatever `course_tools.planning.machines` takes.
        asked: fields of `Question`; names that may be chosen from as one string or several, precision None for the best
            of the card.
    """
    shape, on = shape_of(model), machines(cluster)
    for name in asked:
        pick("argument", name, NAMES)
    for name, known in SEVERAL.items():
        if name in asked:
            asked[name] = _several(name, asked[name], known)
    if not asked.get("precision"):
        asked["precision"] = "fp32" if on.cpu else "bf16-mixed" if on.card.bf16 else "fp16-mixed"
    found = Question(shape, on, **asked)
    check_counts(global_batch=found.global_batch, seq_len=found.seq_len, lora_rank=found.lora_rank)
    pick("precision", found.precision, PRECISIONS)
    check_choice("attention", found.attention)
    if not on.cpu:
        check_card(found.precision, on.card)
    if found.tokens is not None:
        positive(tokens=found.tokens)
    check_length(shape, found.seq_len)
    return found


def _several(name: str, values: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    values = (values,) if isinstance(values, str) else tuple(values)
    if not values:
        raise ValueError(f"{name} is empty: give at least one of {', '.join(known)}.")
    for value in values:
        pick(name, value, known)
    return values
