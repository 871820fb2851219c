"""Lab 3, exercise 6: what the all-reduce of the gradients costs on a given cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from course_checks.harness import NotYet, close, named_mistake, returned
from course_checks.lab03.common import lab
from course_lib.collectives.links import Cluster, Link


class Case(NamedTuple):
    parameters: float
    bytes_each: int
    nodes: int
    gpus: int
    nvlink_both_ways: float  # GB/s, as the data sheet prints it
    nvlink_latency: float  # seconds
    network: float  # Gbit/s
    network_latency: float  # seconds


CASES = [
    Case(1.1e9, 2, 2, 8, 900, 3.4e-6, 400, 9.6e-6),
    Case(7e9, 4, 4, 4, 600, 3.4e-6, 100, 30e-6),
    Case(5e5, 2, 4, 8, 900, 3.4e-6, 25, 30e-6),  # small: the latencies count
    Case(3.5e8, 4, 1, 8, 300, 3.4e-6, 10, 30e-6),  # one node: no network
    Case(3.5e8, 2, 6, 1, 300, 3.4e-6, 10, 30e-6),  # one GPU a node: no NVLink
    Case(1e9, 4, 1, 1, 900, 3.4e-6, 400, 9.6e-6),  # one GPU: nothing to do
]
MISTAKES = {
    "factor": "leaves out 2(n-1)/n: a ring sends that many times the gradients, and not just once",
    "half": "has the reduce-scatter alone: the all-gather takes as long again",
    "whole": "sends all gradients in every step: a step of a ring sends one n-th",
    "bits": "takes the network's Gbit/s for GB/s: a byte has 8 bits",
    "both": "counts both directions of NVLink for one: a rank sends with half of what the data sheet adds up",
    "no latency": "has no latency: every one of the 2(n-1) steps pays it",
    "latency once": "pays the latency once: every one of the 2(n-1) steps pays it",
    "inner": "lets the inner link carry everything: between nodes there is only the network",
    "count": "counts parameters where bytes are wanted",
    "gib": "takes a GB for 2**30 bytes: links are sold in GB, 1e9 bytes",
    "unshared": "gives every GPU the whole network link of its node: its GPUs share it",
    "uncut": "sends all gradients of every GPU over the network: after the reduce-scatter in the node each has its share",
}


@lab.exercise("The cost of a step", importance=4, difficulty=3, minutes=25)
def step_cost(cost: Callable[..., Any]) -> str:
    """Seconds of a flat ring and of the hierarchical all-reduce, held against course_lib.collectives.links on six clusters."""
    given = [returned(cost(*case), (tuple, list), "step_cost's result") for case in CASES]
    if any(len(pair) != 2 for pair in given):
        raise NotYet(
            "step_cost should return two numbers: seconds of the flat ring, and of the hierarchical all-reduce"
        )
    for at, name in enumerate(("flat", "hierarchical")):
        yours, expected = [pair[at] for pair in given], [_expected(case)[at] for case in CASES]
        for case, mine, wanted in zip(CASES, yours, expected, strict=True):
            try:
                close(
                    mine, wanted, rtol=1e-6, atol=1e-12, what=f"the {name} all-reduce, in seconds, of {_words(case)},"
                )
            except NotYet as difference:
                why = named_mistake(
                    yours,
                    lambda c, m, at=at: _mistaken(c, m)[at],
                    CASES,
                    MISTAKES,
                    join="; and it ",
                    rtol=1e-6,
                    atol=1e-12,
                )
                raise NotYet(f"your {name} all-reduce {why}" if why else str(difference)) from None
    flat, hierarchical = _expected(CASES[0])
    return f"as course_lib.collectives.links has it; {_words(CASES[0])}: flat {flat * 1e3:.1f} ms, hierarchical {hierarchical * 1e3:.1f} ms"


def _words(case: Case) -> str:
    return f"{case.parameters:g} parameters of {case.bytes_each} bytes on {case.nodes} x {case.gpus} GPUs"


def _expected(case: Case) -> tuple[float, float]:
    inner = Link("NVLink", case.nvlink_latency, case.nvlink_both_ways / 2 * 1e9)
    outer = Link("network", case.network_latency, case.network / 8 * 1e9)
    cluster = Cluster(case.gpus, case.nodes, inner, outer)
    num_bytes = case.parameters * case.bytes_each
    return cluster.flat_seconds("all_reduce", num_bytes), cluster.seconds("all_reduce", num_bytes)


def _mistaken(case: Case, mistakes: tuple[str, ...]) -> tuple[float, float]:
    """(flat, hierarchical) seconds with mistakes; with none, what course_lib.collectives.links says."""
    num_bytes = case.parameters * (1 if "count" in mistakes else case.bytes_each)
    giga = 2**30 if "gib" in mistakes else 1e9
    inner = case.nvlink_latency, case.nvlink_both_ways * giga / (1 if "both" in mistakes else 2)
    outer = case.network_latency, case.network * giga / (1 if "bits" in mistakes else 8)
    if "inner" in mistakes:
        outer = inner
    ranks, gpus, nodes = case.nodes * case.gpus, case.gpus, case.nodes

    def half_ring(n: int, amount: float, over: tuple[float, float]) -> float:
        """Reduce-scatter or all-gather of ``amount`` bytes over ``n`` ranks."""
        if n == 1:
            return 0.0
        share = 0.5 if "factor" in mistakes else float(n - 1) if "whole" in mistakes else (n - 1) / n
        steps = 0.0 if "no latency" in mistakes else 0.5 if "latency once" in mistakes else n - 1.0
        return steps * over[0] + share * amount / over[1]

    halves = 1 if "half" in mistakes else 2
    flat = halves * half_ring(ranks, num_bytes, outer if nodes > 1 else inner)
    piece = num_bytes if "uncut" in mistakes else num_bytes / gpus
    shared = outer if "inner" in mistakes or "unshared" in mistakes else (outer[0], outer[1] / gpus)
    between = halves * half_ring(nodes, piece, shared)
    return flat, halves * half_ring(gpus, num_bytes, inner) + between
