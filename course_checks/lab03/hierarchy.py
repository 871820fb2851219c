"""Lab 3, exercise 3: an all-reduce over hosts, each with several GPUs, that crosses the slow links with few bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_checks.harness import Contract, fresh_seed, in_bytes, named_seed, on_link, refused
from course_checks.lab03.common import ITEM, Seen, equal, lab, run, values, watched

GRIDS = ((2, 2), (3, 2), (2, 3), (1, 3), (3, 1))  # hosts, GPUs in each
NUMBERS = (30_007, 2)  # one that nothing divides, and fewer than the GPUs of a host
SUM, BETWEEN, INSIDE = "the tensor afterwards", "between hosts", "inside its host"
HINTS = {
    "that is the sum over your host alone": lambda f: f["clause"] == SUM and f["near"]("host"),
    "that is the sum over the ranks in your place, one per host": lambda f: f["clause"] == SUM and f["near"]("place"),
    "the padding is not cut off, or lies in the wrong place": lambda f: f["clause"] == SUM and f["uneven"],
    "it is the function's result, and the tensor itself is not": lambda f: f["clause"] == SUM and f["returned"],
    "it is as it was: the sum belongs into `x` itself": lambda f: f["clause"] == SUM and f["untouched"],
    "which part of the sum does each GPU of a host need to take across?": lambda f: f["clause"] == BETWEEN,
    "an all-reduce inside the host, and then a gather? Half of the first is enough": lambda f: f["clause"] == INSIDE,
}


def on_a_rank(all_reduce: Callable[..., Any], hosts: int, gpus: int, seed: int) -> list[Any]:
    mesh, rank, seen = init_device_mesh("cpu", (hosts, gpus), mesh_dim_names=("host", "gpu")), dist.get_rank(), []
    for number, numbers in enumerate(NUMBERS):
        x = values(numbers, seed + number, rank)
        alias = x.view(-1)
        with refused("the mesh has the groups already: new ones on each call pile up", (dist, "new_group")):
            seen.append((watched(lambda x=x: all_reduce(x, mesh)), alias))
    return seen


@lab.exercise("Across hosts, once", importance=5, difficulty=3, minutes=15, keeps_inputs=False)
def hierarchical(your_all_reduce: Callable[..., Any]) -> str:
    """In place; a rank sends 2(m-1)/m of its GPU's share to other hosts, and a ring's bytes inside its own."""
    seed, said = fresh_seed(), ""
    with named_seed(seed):
        for hosts, gpus in GRIDS:
            results_by_rank = run(on_a_rank, your_all_reduce, hosts, gpus, seed, ranks=hosts * gpus)
            for rank, results in enumerate(results_by_rank):
                for number, (call, x) in enumerate(results):
                    evidence = _right(call, x, rank, hosts, gpus, seed + number)
                    said = said or evidence
    return said


def _right(call: Seen, x: Any, rank: int, hosts: int, gpus: int, seed: int) -> str:
    inputs = [values(len(x), seed, r) for r in range(hosts * gpus)]
    parts = {"host": sum(inputs[rank // gpus * gpus :][:gpus]), "place": sum(inputs[rank % gpus :: gpus])}
    total = sum(inputs)
    facts = {
        "near": lambda part: bool((x == parts[part]).all()),
        "uneven": len(x) % gpus and bool((x == total).float().mean() > 0.2),
        "untouched": bool((x == inputs[rank]).all()),
        "returned": getattr(call.result, "shape", None) == x.shape and bool((call.result == total).all()),
    }
    contract = Contract(HINTS, facts, f"{hosts} hosts of {gpus} ranks, {len(x)} numbers, rank {rank}")
    equal(contract, SUM, x, total)
    sent = {BETWEEN: 0.0, INSIDE: 0.0}
    for collective in call.issued:
        involved = collective.group if collective.peer is None else (rank, collective.peer)
        sent[BETWEEN if len({r // gpus for r in involved}) > 1 else INSIDE] += on_link(collective)
    whole, share = ITEM * len(x), ITEM * -(-len(x) // gpus)  # bytes
    ways = {BETWEEN: (2 * (hosts - 1) / hosts, share, ITEM * hosts), INSIDE: (2 * (gpus - 1), share, ITEM * gpus)}
    for where, (factor, part, padding) in ways.items():
        told = f"{where} it sends {in_bytes(sent[where])}, and should send {in_bytes(factor * part)}"
        contract.holds(factor * (part - ITEM) <= sent[where] <= factor * (part + padding), told, where)
    flat = 2 * (hosts * gpus - 1) / (hosts * gpus) * whole
    return (
        f"exact sums on five grids; {hosts} hosts of {gpus}: each rank sent {in_bytes(sent[BETWEEN])} between hosts and "
        f"{in_bytes(sent[INSIDE])} inside; in a flat ring the rank at a host's end sends {in_bytes(flat)} across"
    )
