"""Lab 5, exercise 3: which stage, and what to offload, on a given machine, and what it costs per step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from course_checks.harness import Contract, NotYet, fresh_seed, number, returned
from course_checks.lab05.common import lab
from course_lib.collectives.links import link
from course_lib.memory import card, estimate, resident_bytes, shape_of
from course_lib.notebook import table
from course_lib.notebook.page import Page
from course_lib.units import GIB, nice_bytes

Setting = tuple[int, str]  # ZeRO's stage; what lies on the host: "none", "optimizer" or "all"
SETTINGS: tuple[Setting, ...] = (
    *((stage, offload) for stage in (1, 2, 3) for offload in ("none", "optimizer")),
    (3, "all"),
)
CHEAPER = 1.01  # times the cheapest setting's seconds


@dataclass(frozen=True)
class Machine:
    """A model, and one host of GPUs to train it on."""

    model: str  # a preset of course_lib.memory
    card: str  # the GPU's name
    gpus: int
    gpu_link: float  # bytes per second that each GPU sends to the others
    host_link: float  # bytes per second between each GPU and the host, in either direction
    host_memory: int  # bytes, for all ranks together
    host_bandwidth: float  # bytes per second at which the host reads and writes its memory, for all ranks together
    micro_batches: int  # per optimizer step

    def __str__(self) -> str:
        links = f"{self.gpu_link / 1e9:.1f} GB/s to each other, {self.host_link / 1e9:.1f} GB/s to the host"
        memory = f"{self.host_memory // GIB:,} GiB at {self.host_bandwidth / 1e9:.0f} GB/s"
        return (
            f"{self.model} on {self.gpus} {self.card}: {links}; {memory}; {self.micro_batches} micro-batches per step"
        )


NVLINK, PCIE = link("nvlink3").bandwidth, link("pcie4").bandwidth
MACHINES = (
    Machine("llama-3.1-8b", "a100-80gb", 8, NVLINK, PCIE, 1024 * GIB, 300e9, micro_batches=4),
    Machine("qwen2.5-14b", "a100-80gb", 4, NVLINK, PCIE, 880 * GIB, 300e9, micro_batches=2),
    Machine("llama-2-13b", "l40s", 8, PCIE, PCIE, 512 * GIB, 300e9, micro_batches=2),
    Machine("llama-2-13b", "rtx4090", 4, PCIE, PCIE, 512 * GIB, 200e9, micro_batches=2),
    Machine("qwen2.5-32b", "rtx4090", 4, PCIE, PCIE, 1024 * GIB, 200e9, micro_batches=4),
    Machine("smollm2-1.7b", "rtx4090", 1, PCIE, PCIE, 64 * GIB, 60e9, micro_batches=4),
)
TIGHT = (  # the host is too small for what the GPUs could do; nothing fits at all
    Machine("llama-2-13b", "l40s", 8, PCIE, PCIE, 128 * GIB, 300e9, micro_batches=16),
    Machine("qwen2.5-32b", "rtx4090", 4, PCIE, PCIE, 256 * GIB, 200e9, micro_batches=2),
)
SLIPS = {
    "adam free": "the host's Adam takes time, too",
    "adam per rank": "all ranks share one host: its Adam steps all P parameters",
    "once": "stages 2 and 3 communicate in every micro-batch",
    "stage 3 twice": "stage 3 gathers the weights for forward and again for backward, and scatters gradients",
    "every micro-batch": "stage 1 copies gradients once per step, however many micro-batches there are",
    "whole": "a rank copies its share, 2 P / N bytes",
    "to itself": "each rank sends N - 1 shares, not N",
    "no gathering from the host": "with the weights on the host, each gathering begins with a copy from there",
}


@lru_cache(maxsize=512)
def gpu_bytes(machine: Machine, setting: Setting) -> int:
    """Bytes that a step needs on each GPU: full activation checkpointing, one sequence of 2,048 tokens."""
    stage, offload = setting
    how = {"strategy": f"zero{stage}", "offload": offload, "ranks": machine.gpus, "bucket_elements": 50_000_000}
    how |= {"num_microbatches": machine.micro_batches, "activation_checkpointing": "full"}
    return estimate(machine.model, precision="bf16-mixed", **how).device  # 16-bit weights, fp32 masters


@lru_cache(maxsize=512)
def host_bytes(machine: Machine, setting: Setting) -> int:
    """Bytes in the host's memory, of all ranks together."""
    stage, offload = setting
    how = {"strategy": f"zero{stage}", "offload": offload, "ranks": machine.gpus}
    return machine.gpus * resident_bytes(machine.model, precision="bf16", **how)["host"]  # also with fp32 masters


def fits(machine: Machine, setting: Setting) -> bool:
    on_gpu = gpu_bytes(machine, setting) <= card(machine.card).memory
    return on_gpu and host_bytes(machine, setting) <= machine.host_memory


def answer(machine: Machine, slip: str = "") -> tuple[Setting, float] | None:
    """What fits for the fewest seconds, or None."""
    possible = [(setting, bill(machine, setting, slip)) for setting in SETTINGS if fits(machine, setting)]
    return min(possible, key=lambda each: each[1], default=None)


def needs(machine: Machine) -> Page:
    """A table of what each setting needs."""
    rows = [
        {
            "setting": str(setting),
            "GiB on each GPU": f"{gpu_bytes(machine, setting) / GIB:.1f} of {card(machine.card).memory / GIB:.0f}",
            "GiB in the host": f"{host_bytes(machine, setting) / GIB:.0f} of {machine.host_memory / GIB:.0f}",
        }
        for setting in SETTINGS
    ]
    return table(rows, caption=str(machine))


def bill(machine: Machine, setting: Setting, slip: str = "") -> float:
    """Seconds per step on links and host, with one slip made."""
    (stage, offload), a, parameters = setting, machine.micro_batches, shape_of(machine.model).parameters
    passes = {1: 2, 2: a + 1, 3: (2 if slip == "stage 3 twice" else 3) * a}[stage]
    if slip == "once":
        passes = {1: 2, 2: 2, 3: 3}[stage]
    share = 2 * parameters / machine.gpus
    copies = {1: 3 * (a if slip == "every micro-batch" else 1), 2: 2 * a + 2, 3: 2 * a + 3}[stage]
    copies += 2 * a - 1 if offload == "all" and slip != "no gathering from the host" else 0
    adam = {"adam free": 0.0, "adam per rank": 28 * parameters / machine.gpus}.get(slip, 28 * parameters)
    seconds = (machine.gpus - (slip != "to itself")) * share * passes / machine.gpu_link
    if offload != "none":
        seconds += (machine.gpus if slip == "whole" else 1) * share * copies / machine.host_link
        seconds += adam / machine.host_bandwidth
    return seconds


def varied(machine: Machine, generator: random.Random) -> Machine:
    """The same with other links, another host's speed, and other micro-batches."""
    links = {
        name: getattr(machine, name) * generator.uniform(0.2, 1.5)
        for name in ("gpu_link", "host_link", "host_bandwidth")
    }
    return replace(machine, **links, micro_batches=generator.randint(2, 12))


@lab.exercise("Stage and offload for a machine", importance=5, difficulty=3, minutes=15)
def choose(choose: Callable[..., Any]) -> str:
    """What fits GPUs and host for the fewest seconds, and these seconds; ValueError where nothing fits."""
    generator = random.Random(fresh_seed())
    machines = [*MACHINES, *TIGHT, *(varied(machine, generator) for machine in MACHINES * 4)]
    answers = [_asked(choose, machine) for machine in machines]

    def made(slip: str) -> bool:
        pairs = zip(answers, (answer(machine, slip) for machine in machines), strict=True)
        return all(a == b or (a and b and a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=0.01)) for a, b in pairs)

    contract = Contract({sentence: lambda _, slip=slip: made(slip) for slip, sentence in SLIPS.items()})
    for machine, given in zip(machines, answers, strict=True):
        contract.about = str(machine)
        _right(contract, machine, given)
    told = [f"{s} on {m.gpus} {m.card} takes {t:.2f} s" for m, (s, t) in zip(MACHINES, answers, strict=False)]
    return f"{', '.join(told)}, and {len(machines) - len(MACHINES)} more"


def _asked(choose: Callable[..., Any], machine: Machine) -> tuple[Setting, float] | None:
    """None: refused."""
    try:
        answer = choose(machine)
    except ValueError:
        return None
    answer = returned(answer, tuple, "(setting, seconds)")
    if len(answer) != 2 or not isinstance(answer[0], (tuple, list)) or tuple(answer[0]) not in SETTINGS:
        raise NotYet(f"{machine}: give (setting, seconds), with one of SETTINGS, not {answer}")
    return tuple(answer[0]), number(answer[1], "the seconds")


def _right(contract: Contract, machine: Machine, given: tuple[Setting, float] | None) -> None:
    best = answer(machine)
    if given is None:
        contract.holds(best is None, f"you raise ValueError, and {best and best[0]} fits")
        return
    setting, seconds = given
    card_memory, needs = card(machine.card).memory, gpu_bytes(machine, setting)
    contract.holds(needs <= card_memory, f"{setting} needs {nice_bytes(needs)} of a GPU's {nice_bytes(card_memory)}")
    host, there = host_bytes(machine, setting), machine.host_memory
    contract.holds(host <= there, f"{setting} needs {nice_bytes(host)} of the host's {nice_bytes(there)}")
    contract.values(f"your seconds for {setting}", seconds, bill(machine, setting), rtol=0.01)
    told = f"{setting} fits, and takes {seconds:.2f} s; another setting that fits takes {best[1]:.2f} s"
    contract.holds(seconds <= CHEAPER * best[1], told)
