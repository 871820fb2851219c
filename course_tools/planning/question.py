"""The question that a search answers, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.memory import Shape, shape_of
from course_lib.memory.settings import CHOICES, check_card
from course_lib.validation import check_counts, pick, positive
from course_tools.planning.constants import CONSTANTS, Constants
from course_tools.planning.machines import Machines, machines

METHODS = CHOICES["method"]
STRATEGIES = CHOICES["strategy"]
CHECKPOINTING = CHOICES["checkpointing"]
OFFLOAD = CHOICES["offload"]
AXES = ("dp", "tp", "pp", "cp")


@dataclass(frozen=True)
class Question:
    """What is asked: see `course_tools.planning.plan` for the fields."""

    shape: Shape
    machines: Machines
    global_batch: int
    seq_len: int
    methods: tuple[str, ...]
    strategies: tuple[str, ...]
    checkpointing: tuple[str, ...]
    offload: tuple[str, ...]
    axes: tuple[str, ...]
    sequence_parallel: bool
    interleave: bool
    precision: str
    attention: str
    lora_rank: int
    tokens: float | None
    constants: Constants

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2


def question(
    model: Any,
    cluster: str | Machines,
    *,
    global_batch: int,
    seq_len: int,
    methods: Sequence[str] = METHODS,
    strategies: Sequence[str] = STRATEGIES,
    checkpointing: Sequence[str] = CHECKPOINTING,
    offload: Sequence[str] = OFFLOAD,
    axes: Sequence[str] = AXES,
    sequence_parallel: bool = True,
    interleave: bool = True,
    precision: str | None = None,
    attention: str = "flash",
    lora_rank: int = 16,
    tokens: float | None = None,
    constants: Constants = CONSTANTS,
) -> Question:
    """The question, or ValueError with one sentence about what is wrong with it."""
    shape, on = shape_of(model), machines(cluster)
    check_counts(global_batch=global_batch, seq_len=seq_len, lora_rank=lora_rank)
    given: dict[str, Any] = {}
    for name, values, known in (
        ("methods", methods, METHODS), ("strategies", strategies, STRATEGIES),
        ("checkpointing", checkpointing, CHECKPOINTING), ("offload", offload, OFFLOAD), ("axes", axes, AXES),
    ):  # fmt: skip
        values = (values,) if isinstance(values, str) else tuple(values)
        if not values:
            raise ValueError(f"{name} is empty: give at least one of {', '.join(known)}.")
        for value in values:
            pick(name, value, known)
        given[name] = values
    if precision is None:
        precision = "fp32" if on.cpu else "bf16-mixed" if on.card.bf16 else "fp16-mixed"
    pick("precision", precision, CHOICES["precision"])
    pick("attention", attention, CHOICES["attention"])
    if not on.cpu:
        check_card(precision, on.card)
    if tokens is not None:
        positive(tokens=tokens)
    if shape.positions and seq_len > shape.positions:
        raise ValueError(f"{shape.name} has {shape.positions:,} learned positions: seq_len={seq_len:,} is too long.")
    return Question(
        shape, on, global_batch, seq_len, **given, sequence_parallel=sequence_parallel,
        interleave=interleave, precision=precision, attention=attention, lora_rank=lora_rank, tokens=tokens, constants=constants,
    )  # fmt: skip
