"""The machines of lab 5's choice of a stage, and what a setting needs on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from course_lib.collectives.links import link
from course_lib.memory import card, estimate, shape_of
from course_lib.units import GIB

Setting = tuple[int, str]  # ZeRO's stage; what lies on the host: "none", "optimizer" or "all"
SETTINGS: tuple[Setting, ...] = ((1, "none"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"), (3, "all"))
# Bytes a parameter on the host, all ranks of it together, as DeepSpeed's own estimate_zero2_… and estimate_zero3_model_
# states_mem_needs count them, without their safety factor of 1.5.
ON_HOST = {"none": 0, "optimizer": 16, "all": 18}


@dataclass(frozen=True)
class Machine:
    """A model, and what it is to be trained on.

    Attributes:
        model: a preset of ``course_lib.memory``.
        card: the GPU's name.
        gpus: how many of them, all in one host.
        gpu_link: bytes a second that a GPU sends to the others.
        host_link: bytes a second between a GPU and the host's memory.
        host_memory: bytes, for all ranks together.
        micro_batches: forward and backward passes in one optimizer step.
    """

    model: str
    card: str
    gpus: int
    gpu_link: float
    host_link: float
    host_memory: int
    micro_batches: int

    def __str__(self) -> str:
        passes = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} a step"
        links = f"{self.gpu_link / 1e9:.1f} GB/s to each other, " if self.gpus > 1 else ""
        host = f"{self.host_link / 1e9:.1f} GB/s to the host's {self.host_memory // GIB:,} GiB"
        return f"{self.model} on {self.gpus} x {self.card} ({links}{host}, {passes})"


def _machine(model: str, gpus: int, name: str, links: tuple[str, str], memory: int, micro_batches: int) -> Machine:
    """``links``: between GPUs, and to the host. ``memory``: the host's, GiB."""
    gpu_link, host_link = (link(each).bandwidth for each in links)
    return Machine(model, name, gpus, gpu_link, host_link, memory * GIB, micro_batches)


MACHINES: tuple[Machine, ...] = (
    _machine("llama-3.1-8b", 8, "a100-80gb", ("nvlink3", "pcie4"), 1024, 4),
    _machine("qwen2.5-14b", 4, "a100-80gb", ("nvlink3", "pcie4"), 880, 1),
    _machine("llama-2-13b", 8, "l40s", ("pcie4", "pcie4"), 512, 2),
    _machine("qwen2.5-7b", 8, "v100-32gb", ("nvlink2", "pcie3"), 600, 2),
    _machine("smollm2-1.7b", 1, "rtx4090", ("pcie4", "pcie4"), 64, 4),
)
MORE = (  # not announced
    _machine("qwen3-4b", 8, "rtx4090", ("pcie4", "pcie4"), 512, 2),
    _machine("llama-3.1-8b", 8, "a100-80gb", ("nvlink3", "pcie4"), 1024, 1),  # stages 1 and 2 cost the same
    _machine("llama-2-13b", 8, "l40s", ("pcie4", "pcie4"), 512, 1),
    _machine("llama-2-13b", 8, "l40s", ("pcie4", "pcie4"), 512, 8),
    _machine("llama-2-13b", 8, "l40s", ("pcie4", "pcie4"), 128, 2),  # the host is too small
    _machine("qwen2.5-7b", 8, "v100-32gb", ("nvlink2", "pcie3"), 600, 8),  # micro-batches turn the choice round
    _machine("qwen2.5-7b", 8, "v100-16gb", ("nvlink2", "pcie3"), 600, 2),
    _machine("qwen2.5-32b", 16, "v100-16gb", ("nvlink2", "pcie3"), 1500, 2),
    _machine("smollm2-1.7b", 1, "rtx4090", ("pcie4", "pcie4"), 16, 4),  # nothing fits
)


@lru_cache(maxsize=256)
def gpu_bytes(machine: Machine, setting: Setting) -> int:
    """What a step needs on each GPU, bytes, with full activation checkpointing and one sequence of 2,048 tokens."""
    stage, offload = setting
    return estimate(
        machine.model,
        strategy=f"zero{stage}",
        offload=offload,
        ranks=machine.gpus,
        num_microbatches=machine.micro_batches,
        precision="bf16-mixed" if card(machine.card).bf16 else "fp16-mixed",
        activation_checkpointing="full",
    ).device


def host_bytes(machine: Machine, setting: Setting) -> int:
    """What lies in the host's memory, bytes, of all ranks together."""
    return ON_HOST[setting[1]] * shape_of(machine.model).parameters
