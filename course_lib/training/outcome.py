"""What every training program returns, so that programs can be compared with each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.observe.steps import Observation


@dataclass
class Outcome:
    """What a training program returns on each rank.

    Attributes:
        losses: mean loss of the whole global batch, one per step, equal on every rank.
        wrapper: class name of what wrapped the model: proof that no launcher silently fell back to something else.
        rank, world_size: this rank's place.
        median_step: seconds, the first step left out; 0 where no step was timed.
        tokens_per_second: this rank's; 0 where no step was timed.
        memory: bytes by category (see `Observation.memory`).
        wire_bytes: bytes this rank sent per step (see `Observation.wire_bytes`).
        extra: what this program reports beyond the others.
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


def outcome(observation: Observation, losses: list[float], wrapper: str, **extra: Any) -> Outcome:
    """Return this rank's `Outcome`, with rank and world size from the process group (rank 0 of 1 without one).

    Args:
        observation: of the training loop.
        losses, wrapper, extra: as in `Outcome`.
    """
    import torch.distributed as dist

    grouped = dist.is_available() and dist.is_initialized()
    by_sockets = grouped and "nccl" not in dist.get_backend()  # alone, its sockets are somebody else's: Jupyter's
    return Outcome(
        losses=losses,
        wrapper=wrapper,
        rank=dist.get_rank() if grouped else 0,
        world_size=dist.get_world_size() if grouped else 1,
        median_step=observation.median_step if observation.step_seconds else 0.0,
        tokens_per_second=observation.tokens_per_second if observation.step_seconds else 0.0,
        memory=observation.memory,
        wire_bytes=observation.wire_bytes if by_sockets else None,
        extra=extra,
    )
