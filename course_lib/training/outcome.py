"""What every training program of the course returns, so that programs can be compared with each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """The result of one rank.

    Attributes:
        losses: mean loss of the whole global batch, one a step, equal on every rank.
        wrapper: class name of what wrapped the model: a proof that no launcher fell back to something else in silence.
        rank, world_size: this rank's place.
        median_step: seconds, the first step left out.
        tokens_per_second: this rank's.
        memory: bytes by category (see ``course_lib.observe``).
        wire_bytes: bytes this rank sent a step, counted by the system over the later half of the steps; ``None`` where
            nothing counts them.
        extra: what one program tells beyond the others.
    """

    losses: list[float]
    wrapper: str
    rank: int
    world_size: int
    median_step: float
    tokens_per_second: float
    memory: dict[str, int]
    wire_bytes: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
