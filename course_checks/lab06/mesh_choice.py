"""Lab 6, exercise 4: a mesh and reshard_after_forward for given machines: the fewest bytes over the slow link that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_checks.harness import NotYet, returned
from course_checks.lab06.common import lab
from course_checks.lab06.hybrid import Traffic, true_traffic


@dataclass(frozen=True)
class Cluster:
    """Machines, and a model to train on them in fp32 with AdamW.

    Attributes:
        parameters: of the model; ``largest``: of its largest unit.
        machines, gpus: GPUs in each machine; ranks are numbered machine by machine.
        memory: bytes of one GPU that are left for parameters, gradients and AdamW's states.
    """

    parameters: int
    largest: int
    machines: int
    gpus: int
    memory: int

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e9:g}e9 parameters (largest unit {self.largest / 1e6:g}e6), {self.machines} x {self.gpus} "
            f"GPUs with {self.memory / 1e9:g} GB"
        )


CLUSTERS = (
    Cluster(1_000_000_000, 50_000_000, 4, 8, 20_000_000_000),  # even whole copies fit
    Cluster(8_000_000_000, 250_000_000, 4, 8, 60_000_000_000),  # one machine holds it, kept between the passes
    Cluster(8_000_000_000, 250_000_000, 4, 8, 40_000_000_000),  # one machine, only when resharded
    Cluster(30_000_000_000, 500_000_000, 4, 8, 75_000_000_000),  # one machine is 60 GB + the largest unit
    Cluster(30_000_000_000, 500_000_000, 4, 8, 50_000_000_000),  # two machines
    Cluster(70_000_000_000, 900_000_000, 4, 8, 40_000_000_000),  # all of them
    Cluster(70_000_000_000, 900_000_000, 4, 8, 20_000_000_000),  # not at all
    Cluster(8_000_000_000, 250_000_000, 1, 8, 75_000_000_000),
)
Choice = tuple[int, int, bool]


def need_bytes(cluster: Cluster, shard: int, reshard: bool) -> float:
    """Bytes on a GPU: 16 a parameter over the shard group, and what is gathered: the largest unit, or all of it."""
    gathered = cluster.largest if reshard else cluster.parameters
    return 16 * cluster.parameters / shard + (4 * gathered if shard > 1 else 0)


def slow_and_fast_bytes(cluster: Cluster, choice: Choice) -> tuple[float, float]:
    """Bytes that a rank sends in a step over rings that leave its machine, and over rings that do not."""
    replicate, shard, reshard = choice
    inside, across = true_traffic(Traffic(cluster.parameters, replicate, shard, reshard))
    slow = (inside if shard > cluster.gpus else 0.0) + (across if cluster.machines > 1 else 0.0)
    return slow, inside + across - slow


def choices(cluster: Cluster) -> list[Choice]:
    """Every mesh whose shard group divides a machine or is made of whole machines, with and without resharding."""
    ranks = cluster.machines * cluster.gpus
    shards = [s for s in range(1, ranks + 1) if ranks % s == 0 and (cluster.gpus % s == 0 or s % cluster.gpus == 0)]
    return [(ranks // s, s, reshard) for s in shards for reshard in (False, True)]


def best(cluster: Cluster) -> list[Choice]:
    """The choices that fit with the fewest bytes over the slow link, then over the fast; empty where nothing fits."""
    fitting = [c for c in choices(cluster) if need_bytes(cluster, c[1], c[2]) <= cluster.memory]
    least = min((slow_and_fast_bytes(cluster, c) for c in fitting), default=None)
    return [c for c in fitting if slow_and_fast_bytes(cluster, c) == least]


@lab.exercise("A mesh for given machines", importance=4, difficulty=3, minutes=20)
def mesh_choice(choose: Callable[..., Any]) -> str:
    """The choice of (replicate, shard, reshard) held against every possible one, on eight clusters."""
    for cluster in CLUSTERS:
        wanted = best(cluster)
        try:
            choice = choose(cluster)
        except ValueError:
            if not wanted:
                continue
            raise NotYet(f"{cluster}: you refuse, and {wanted[0]} fits") from None
        choice = returned(choice, (tuple, list), "the choice")
        if len(choice) != 3 or not all(isinstance(n, int) and n > 0 for n in choice[:2]):
            raise NotYet(f"{cluster}: give (replicate, shard, reshard), not {choice}")
        _right_choice(cluster, (int(choice[0]), int(choice[1]), bool(choice[2])), wanted)
    slow = [slow_and_fast_bytes(CLUSTERS[2], c)[0] / 1e9 for c in (best(CLUSTERS[2])[0], (1, 32, True))]
    return (
        f"eight clusters; {CLUSTERS[2]}: sharding inside the machine sends {slow[0]:.0f} GB a rank and step over the slow "
        f"link, sharding over all ranks {slow[1]:.0f} GB"
    )


def _right_choice(cluster: Cluster, choice: Choice, wanted: list[Choice]) -> None:
    if choice in wanted:
        return
    replicate, shard, reshard = choice
    ranks = cluster.machines * cluster.gpus
    if replicate * shard != ranks:
        raise NotYet(f"{cluster}: {replicate} x {shard} is {replicate * shard} ranks of {ranks}")
    if choice not in choices(cluster):
        raise NotYet(
            f"{cluster}: a shard group of {shard} cuts a machine of {cluster.gpus} GPUs apart: take part of one machine or "
            "whole machines"
        )
    need = need_bytes(cluster, shard, reshard)
    if need > cluster.memory:
        resting = 16 * cluster.parameters / shard
        why = (
            "what is gathered comes on top of the 16 bytes a parameter"
            if resting <= cluster.memory
            else "16 bytes a parameter over the shard group alone are more than that"
        )
        raise NotYet(f"{cluster}: {choice} needs {need / 1e9:.1f} GB on each GPU: {why}")
    assert wanted, "a choice that fits although none does"
    mine, least = slow_and_fast_bytes(cluster, choice), slow_and_fast_bytes(cluster, wanted[0])
    shown = f"{cluster}: {choice} fits and sends {mine[0] / 1e9:.1f} GB over the slow link"
    if mine[0] > least[0]:
        why = (
            "shard no wider than the memory asks for"
            if shard > wanted[0][1]
            else "what the replicas all-reduce is 1/shard of the gradients, so shard over the whole machine"
        )
        raise NotYet(f"{shown}, {wanted[0]} only {least[0] / 1e9:.1f} GB: {why}")
    raise NotYet(
        f"{shown}, as {wanted[0]} does, and {mine[1] / 1e9:.1f} GB inside the machine where {least[1] / 1e9:.1f} GB do"
        + (": it has room to keep the parameters for backward" if reshard and shard == wanted[0][1] else "")
    )
