"""Lab 4, exercise 3: the bucket size that makes the shortest step, for uneven layers over a given link."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_checks.harness import Contract, fresh_seed, number, returned, run_ranks, slip_hints
from course_checks.lab04.common import lab
from course_lib.collectives.links import Link
from course_lib.launch.emulation import slow_link, through_the_link

LONGER, OFF = 0.01, 0.02  # a step may be so much longer than the shortest, a prediction so far off


class Layer(NamedTuple):
    """One parameter: bytes of its gradient, seconds of its forward and of its backward."""

    gradient_bytes: int
    forward: float
    backward: float


class Job(NamedTuple):
    layers: list[Layer]  # in the order of forward
    link: Link
    ranks: int

    def __str__(self) -> str:
        total = sum(layer.gradient_bytes for layer in self.layers) / 2**20
        speed = f"{self.link.bandwidth / 1e6:,.0f} MB/s, {self.link.latency * 1e6:,.0f} us a message"
        return f"{len(self.layers)} layers, {total:,.1f} MiB, {self.ranks} ranks, {speed}"


def _job(sizes: list[float], forward: float, link: Link, ranks: int) -> Job:
    """Layers of so many MiB. Large ones take longer, and an embedding, which comes first, hardly any time."""
    costs = [0.1, *(0.3 + size / max(sizes[1:]) for size in sizes[1:])]
    unit = forward / sum(costs)
    layers = [Layer(int(size * 2**18) * 4, c * unit, 2 * c * unit) for size, c in zip(sizes, costs, strict=True)]
    return Job(layers, link, ranks)


SHOWN = _job(  # here a bucket that a coarse search finds is 5 % too slow
    [0.89, 0.6, 0.15, 0.25, 0.05, 0.05, 0.25, 0.2, 0.4, 0.4, 0.5, 0.1, 0.3, 0.4, 0.1, 0.4, 0.3, 0.59],
    0.04,
    Link("shown", 4e-3, 100e6),
    ranks=2,
)


def jobs(seed: int) -> list[Job]:
    """Fresh sizes: bound by the link, by computing, by latency, and with an output layer that is half of all."""
    draw = random.Random(seed)

    def blocks(count: int, size: float) -> list[float]:
        return [size * draw.uniform(0.7, 1.3) * share for _ in range(count) for share in (0.4, 1.0)]

    return [
        _job([64.0, *blocks(12, 12), 20.0], 0.05, Link("Ethernet", 20e-6, draw.uniform(2e9, 3e9)), ranks=64),
        _job([40.0, *blocks(16, 25), 10.0], 0.30, Link("InfiniBand", 5e-6, draw.uniform(9e9, 14e9)), ranks=256),
        _job([8.0, *blocks(20, 1.5), 8.0], 0.02, Link("far", draw.uniform(5e-5, 9e-5), 5e9), ranks=32),
        _job([6.0, *blocks(8, 10), 120.0], 0.08, Link("slow", 1e-4, draw.uniform(1.5e9, 2e9)), ranks=32),
    ]


def step_seconds(case: tuple[Job, float], slip: str = "") -> float:
    """From the start of forward until backward is over and the last bucket has arrived, with this slip made."""
    (layers, link, n), bucket_bytes = case
    messages = 0 if slip == "no latency" else 2 * (n - 1)
    share = 1 if slip == "no ring" else 2 * (n - 1) / n
    ready = sum(layer.forward for layer in layers)
    free = held = 0.0
    for layer in layers[::-1]:
        if slip == "closes before" and held and held + layer.gradient_bytes > bucket_bytes:
            free, held = max(ready, free) + messages * link.latency + share * held / link.bandwidth, 0.0
        ready += layer.backward
        held += layer.gradient_bytes
        if held >= bucket_bytes or layer is layers[0]:
            leaves = ready if slip == "no queue" else max(ready, free)
            free, held = leaves + messages * link.latency + share * held / link.bandwidth, 0.0
    return free


SENTENCES = {
    "no latency": "the latency of the ring's messages is not in it",
    "no ring": "each rank sends 2(n-1)/n times the bucket's bytes, not once",
    "no queue": "a bucket leaves although the link still carries the one before",
    "closes before": "DDP closes a bucket as soon as it holds `bucket` bytes or more, not before it would grow too large",
}


def shortest(job: Job) -> tuple[float, float]:
    """(seconds, bucket) of the best bucket size: only sums of neighbouring layers can matter."""
    sizes = [layer.gradient_bytes for layer in job.layers]
    caps = {sum(sizes[i:j]) for i, j in itertools.combinations(range(len(sizes) + 1), 2)}
    return min((step_seconds((job, cap)), cap) for cap in caps)


def _tell(drawn: list[Job]) -> bool:
    """Whether coarse searches, a grid of 100 sizes and the sums from the output layer on, are too slow for some job."""
    for search in (
        lambda sizes: [sum(sizes) * i / 100 for i in range(1, 101)],
        lambda sizes: itertools.accumulate(sizes[::-1]),
    ):
        found = [
            min(step_seconds((job, cap)) for cap in search([layer.gradient_bytes for layer in job.layers]))
            for job in drawn
        ]
        if all(seconds < 1.011 * shortest(job)[0] for seconds, job in zip(found, drawn, strict=True)):
            return False
    return True


@lab.exercise("The bucket that makes the shortest step", importance=4, difficulty=3, minutes=20)
def best_bucket(choose: Callable[..., Any]) -> str:
    """Within 1 % of the shortest step for five jobs, four of them fresh; predicts it; and real DDP agrees on one."""
    cases, yours = [], []
    seeds = itertools.count(fresh_seed())
    for job in [SHOWN, *next(drawn for drawn in map(jobs, seeds) if _tell(drawn))]:
        answer = returned(choose(list(job.layers), job.link, job.ranks), tuple, "(bucket, seconds)")
        Contract(about=str(job)).holds(len(answer) == 2, f"return two numbers, (bucket, seconds), not {answer}")
        cases.append((job, number(answer[0], "the bucket"))), yours.append(number(answer[1], "the seconds of the step"))
    hints = slip_hints(step_seconds, SENTENCES, cases, yours, 1e-3)
    for (job, bucket), seconds in zip(cases, yours, strict=True):
        contract = Contract(hints, about=str(job))
        contract.holds(bucket >= 1000, f"a bucket of {bucket:g} bytes: return (bytes, seconds)")
        actual, (best, better) = step_seconds((job, bucket)), shortest(job)
        predicted = f"with {bucket:,.0f} bytes you predict {seconds * 1e3:.2f} ms, and it takes {actual * 1e3:.2f} ms"
        contract.holds(abs(seconds / actual - 1) <= OFF, predicted)
        slow = (
            f"{bucket:,.0f} bytes make a step of {actual * 1e3:.2f} ms, and {better:,} bytes one of {best * 1e3:.2f} ms"
        )
        contract.holds(actual <= (1 + LONGER) * best, slow)
    chosen, default = (emulated_step(cases[0][0], cap) for cap in (cases[0][1], 25 * 2**20))
    return (
        f"five jobs; on the emulated link real DDP takes {chosen * 1e3:.0f} ms with your buckets, which you predict as "
        f"{yours[0] * 1e3:.0f}, and {default * 1e3:.0f} with 25 MiB"
    )


# ------------------------------------------------------------------------------- the same step by DDP, on real ranks
class Sleeper(nn.Module):
    """One parameter; forward and backward sleep, so the processor is free meanwhile, as a CPU beside a GPU is."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(layer.gradient_bytes // 4)), layer.forward
        self.register_full_backward_pre_hook(lambda *_: time.sleep(layer.backward))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x + self.weight.sum()


def _timed(job: Job, bucket_bytes: float) -> float:
    options = {"bucket_cap_mb": bucket_bytes / 2**20, "gradient_as_bucket_view": True}
    with slow_link(job.link):
        model = through_the_link(DistributedDataParallel(nn.Sequential(*map(Sleeper, job.layers)), **options))
        took = []
        for _ in range(6):
            dist.barrier()
            start = time.perf_counter()
            model(torch.ones(1, requires_grad=True)).sum().backward()
            took.append(time.perf_counter() - start)
    return min(took[1:])  # the first step has one bucket


def emulated_step(job: Job, bucket_bytes: float) -> float:
    """Seconds of the shortest of a few steps of DDP over the emulated link, after its first."""
    return run_ranks(_timed, job, bucket_bytes, ranks=job.ranks, timeout=60).results[0]
