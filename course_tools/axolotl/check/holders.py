"""Who holds what: weights, gradients and optimizer state of each rank, in shares and in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.memory import Breakdown
from course_tools.axolotl.check.settings import Settings

NAMES = {
    "single": "one rank",
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "tensor": "tensor parallelism",
    "zero0": "DeepSpeed, ZeRO-0",
    "zero1": "DeepSpeed, ZeRO-1",
    "zero2": "DeepSpeed, ZeRO-2",
    "zero3": "DeepSpeed, ZeRO-3",
}


@dataclass(frozen=True)
class Holder:
    """One kind of state on each rank.

    Attributes:
        what: "weights", "gradients" or "optimizer".
        parts: a rank holds one of so many parts; 1 is a whole copy. bytes: on the fullest rank; None where unknown.
        where: "GPU" or "host".
    """

    what: str
    parts: int
    bytes: int | None
    where: str = "GPU"

    @property
    def share(self) -> str:
        return "all" if self.parts == 1 else f"1/{self.parts}"


def strategy_name(settings: Settings) -> str:
    """The wrapper in words, with the axes that divide the ranks."""
    name = NAMES[settings.strategy]
    if settings.strategy == "fsdp" and settings.data_ranks * settings.context_parallel > settings.shard_ranks:
        copies = settings.data_ranks * settings.context_parallel // settings.shard_ranks
        name += f", {copies} copies of {settings.shard_ranks} shards"
    if settings.tensor_parallel > 1 and settings.strategy != "tensor":
        name += f" x tensor parallelism over {settings.tensor_parallel}"
    if settings.context_parallel > 1:
        name += f" x context parallelism over {settings.context_parallel}"
    return name


def holders(settings: Settings, memory: Breakdown | None, offload: str = "none") -> list[Holder]:
    """Weights, gradients and optimizer state of one rank."""
    strategy, cut = settings.strategy, settings.tensor_parallel
    ranks = settings.shard_ranks if strategy == "fsdp" else settings.data_ranks
    if strategy.startswith("zero") and settings.context_parallel > 1:  # ZeRO cuts over all ranks of a model copy
        ranks *= settings.context_parallel
    stage = {"fsdp": 3, "zero1": 1, "zero2": 2, "zero3": 3}.get(strategy, 0)
    found = []
    for what, least in (("weights", 3), ("gradients", 2), ("optimizer", 1)):
        host = offload == "all" or (offload == "optimizer" and what != "weights")
        found.append(
            Holder(
                what,
                cut * (ranks if stage >= least else 1),
                None if memory is None or host else getattr(memory, what),
                "host" if host else "GPU",
            )
        )
    return found
