"""A run's choices, checked, and what follows from them alone: which dtype each kind of tensor has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from course_lib.memory import settings
from course_lib.memory.blocks import Numerics
from course_lib.validation import check_counts

SHARDING = ("zero1", "zero2", "zero3", "fsdp")


@dataclass(frozen=True, eq=False)  # compared by identity, which is quick: `run_of` gives equal choices the same one
class Run:
    """The choices of :func:`course_lib.memory.estimate` by the same names, then, in bytes an element:

    Attributes:
        stored, factors: weights that are not quantized; LoRA's factors.
        at_rest: weights between steps (FSDP's shards are fp32 where it computes in 16 bits).
        master: fp32 copies of trained weights beside them.
        state: one Adam state. gradient: a gradient at rest.
        scaled: fp16 needs loss scaling.
        reshard: fsdp lets a block's gathered weights go after its forward pass.
        bucket_elements: DeepSpeed's reduce_bucket_size.
    """

    method: str
    optimizer: str
    strategy: str
    offload: str
    step: str
    device: str
    checkpointing: str
    rank: int
    numerics: Numerics
    stored: int
    factors: int
    at_rest: int
    master: int
    state: int
    gradient: int
    scaled: bool
    reshard: bool
    bucket_elements: int

    @property
    def full(self) -> bool:
        return self.method == "full"

    @property
    def sharding(self) -> bool:
        return self.strategy in SHARDING


@lru_cache(maxsize=4096)
def run_of(
    method: str, precision: str, optimizer: str, strategy: str, offload: str, step: str, device: str, checkpointing: str,
    attention: str, lora_rank: int, reshard: bool, bucket_elements: int,
) -> Run:  # fmt: skip
    """Raises ValueError for an unknown choice, and for choices that no program runs together."""
    settings.check_choices(
        method=method, precision=precision, optimizer=optimizer, strategy=strategy, offload=offload, step=step,
        device=device, checkpointing=checkpointing, attention=attention,
    )  # fmt: skip
    settings.check_method(method, optimizer, strategy, offload, lora_rank)
    check_counts(bucket_elements=bucket_elements)
    if type(reshard) is not bool:
        raise ValueError(f"reshard={reshard!r}: give True or False.")
    mixed, sharding, full = precision.endswith("mixed"), strategy in SHARDING, method == "full"
    compute = 4 if precision == "fp32" else 2
    autocast = mixed and not sharding
    stored = 4 if precision == "fp32" or (autocast and full) else 2
    factors = 4 if precision == "fp32" or autocast else 2
    at_rest, master = stored, 0
    if sharding and mixed:
        at_rest, master = (4, 0) if strategy == "fsdp" and full else (2, 4)
    elif strategy in ("zero1", "zero2", "zero3"):
        master = 4  # DeepSpeed copies its partition in fp32 whatever its dtype
    if strategy == "fsdp":
        master = 0  # the shards are the master copy
    return Run(
        method, optimizer, strategy, offload, step, device, checkpointing, lora_rank if not full else 0,
        Numerics(method, compute, stored, factors, autocast, attention == "eager"),
        stored, factors, at_rest, master,
        state=2 if precision == "bf16" and not strategy.startswith("zero") else 4,  # DeepSpeed's belong to fp32 copies
        gradient=4 if strategy == "fsdp" and mixed else (stored if full else factors),
        scaled=precision == "fp16-mixed",
        reshard=reshard, bucket_elements=bucket_elements,
    )  # fmt: skip
