"""Lab 6, exercise 3: hybrid sharding: who shares with whom, and what each link carries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from course_checks.harness import NotYet, close, named_mistake, returned, run_ranks
from course_checks.lab06.common import lab

GRIDS = ((2, 3), (3, 2), (2, 2), (1, 4), (4, 1), (4, 8))  # replicate x shard


class Traffic(NamedTuple):
    """One question about traffic; ``parameters`` are fp32, and so are the gradients that are reduced."""

    parameters: int
    replicate: int
    shard: int
    reshard: bool


TRAFFIC = (
    Traffic(48_000_000, 4, 8, True),
    Traffic(48_000_000, 4, 8, False),
    Traffic(48_000_000, 1, 32, True),
    Traffic(6_000_000, 2, 3, True),
    Traffic(1_000_000, 16, 1, True),
    Traffic(7_000_000, 1, 1, False),
    Traffic(7_000_000, 3, 4, False),
)
INSIDE = {
    "gathered once": "gathers once where reshard_after_forward frees the parameters: backward must gather them again",
    "gathered twice": "gathers twice where the parameters are kept from forward to backward",
    "no gradients": "leaves out the gradients, which are reduce-scattered inside the shard group",
    "all-reduced": "all-reduces the gradients inside the shard group; a reduce-scatter is half of that",
    "whole": "sends the whole model: with n ranks in a ring each sends n-1 of n parts",
    "swapped": "takes the replicate dimension for the shard dimension",
    "world": "shards over all ranks, not over the shard group alone",
    "count": "counts parameters where bytes are wanted: fp32 has 4 each",
}
ACROSS = {
    "whole": "all-reduces all gradients; after the reduce-scatter a rank has 1/shard of them",
    "half": "forgets that an all-reduce is a reduce-scatter and an all-gather: 2(n-1)/n",
    "no ring": "sends the whole shard twice: with n ranks in a ring each sends n-1 of n parts, two times",
    "swapped": "takes the shard dimension for the replicate dimension",
    "parameters": "moves parameters across as well: each replica has them all",
    "count": "counts parameters where bytes are wanted: fp32 has 4 each",
}


@lab.exercise("Hybrid sharding: groups and traffic", importance=4, difficulty=3, minutes=25)
def hybrid(groups: Callable[..., Any], traffic: Callable[..., Any]) -> str:
    """Groups as init_device_mesh makes them on four ranks; bytes as fully_shard sends them over those groups."""
    for replicate, shard in GRIDS:
        for rank in range(replicate * shard):
            _right_groups(groups(rank, replicate, shard), rank, replicate, shard)
    yours = [_pair(traffic(*case), case) for case in TRAFFIC]
    for at, (name, words) in enumerate((("inside the shard group", INSIDE), ("across the replicas", ACROSS))):
        mine = [pair[at] for pair in yours]
        for case, value in zip(TRAFFIC, mine, strict=True):
            try:
                close(value, true_traffic(case)[at], rtol=1e-9, atol=0.5, what=f"{_shown(case)}: bytes {name}")
            except NotYet as difference:
                mistake = named_mistake(
                    mine, lambda c, m, at=at: _mistaken(c, m)[at], TRAFFIC, words, join="; and it ", rtol=1e-6
                )
                raise NotYet(f"{name} your traffic {mistake}" if mistake else str(difference)) from None
    seen = _on_four_ranks()
    for case, measured in seen:
        rank_groups = [groups(rank, case.replicate, case.shard) for rank in range(4)]
        if measured["groups"] != [[list(group) for group in pair] for pair in rank_groups]:
            raise NotYet(f"init_device_mesh made the groups {measured['groups']} for {_shown(case)}, and yours differ")
        close(
            list(traffic(*case)),
            measured["bytes"],
            rtol=1e-9,
            atol=0.5,
            what=f"{_shown(case)}: bytes that fully_shard sent",
        )
    (case, measured) = seen[0]
    return (
        f"six grids; on 4 real ranks as 2x2 fully_shard sent {measured['bytes'][0]:,.0f} bytes a rank and step inside the "
        f"shard groups and {measured['bytes'][1]:,.0f} across, as you say, and without resharding too"
    )


def _shown(case: Traffic) -> str:
    return f"{case.parameters:,} parameters on {case.replicate}x{case.shard} ranks, reshard {case.reshard}"


def _pair(value: Any, case: Traffic) -> tuple[Any, Any]:
    value = returned(value, (tuple, list), "the traffic")
    if len(value) != 2:
        raise NotYet(
            f"{_shown(case)}: give two numbers, bytes inside the shard group and bytes across the replicas, not {value}"
        )
    return tuple(value)


def true_groups(rank: int, replicate: int, shard: int) -> tuple[list[int], list[int]]:
    """(ranks of the shard group, ranks of the replicate group) of arange(replicate * shard).view(replicate, shard)."""
    row, column = divmod(rank, shard)
    return [row * shard + i for i in range(shard)], [i * shard + column for i in range(replicate)]


def _right_groups(value: Any, rank: int, replicate: int, shard: int) -> None:
    where = f"rank {rank} on a {replicate}x{shard} mesh (replicate x shard)"
    value = returned(value, (tuple, list), "what groups() gives")
    if len(value) != 2 or not all(isinstance(each, (list, tuple, range)) for each in value):
        raise NotYet(f"{where}: give two lists of ranks, the shard group and the replicate group")
    mine = tuple([int(r) for r in each] for each in value)
    wanted = true_groups(rank, replicate, shard)
    if mine == wanted:
        return
    if mine == wanted[::-1]:
        raise NotYet(f"{where}: {mine[0]} is the replicate group: give the shard group first")
    other = true_groups(rank, shard, replicate)
    if mine in (other, other[::-1]):
        raise NotYet(
            f"{where}: you give {mine}. That is the mesh {shard}x{replicate}: ranks of one machine are neighbours, so the "
            "shard dimension is the last one, arange(…).view(replicate, shard)"
        )
    if sorted(mine[0]) == wanted[0] and sorted(mine[1]) == wanted[1]:
        raise NotYet(f"{where}: the right ranks, and not in their order: {mine}")
    name, got, want = next((n, g, w) for n, g, w in zip(("shard", "replicate"), mine, wanted, strict=True) if g != w)
    if rank not in got:
        raise NotYet(f"{where}: its {name} group {got} does not have rank {rank} in it")
    raise NotYet(f"{where}: its {name} group should be {want}, and you give {got}")


def true_traffic(case: Traffic) -> tuple[float, float]:
    """Bytes that one rank sends in a step by rings: (inside its shard group, across to the other replicas)."""
    return _mistaken(case, ())


def _mistaken(case: Traffic, mistakes: tuple[str, ...]) -> tuple[float, float]:
    whole = case.parameters * (1 if "count" in mistakes else 4)
    replicate, shard = (case.shard, case.replicate) if "swapped" in mistakes else (case.replicate, case.shard)
    group = replicate * shard if "world" in mistakes else shard
    ring = float(group > 1) if "whole" in mistakes else (group - 1) / group
    gathers = 1 if "gathered once" in mistakes else 2 if "gathered twice" in mistakes else 1 + case.reshard
    scatters = 0 if "no gradients" in mistakes else 2 if "all-reduced" in mistakes else 1
    part = whole if "whole" in mistakes else whole / shard
    ring_across = float(replicate > 1) if "no ring" in mistakes else (replicate - 1) / replicate
    times = (1 if "half" in mistakes else 2) + (1 if "parameters" in mistakes else 0)
    return (gathers + scatters) * ring * whole, times * ring_across * part


@functools.cache
def _on_four_ranks() -> list[tuple[Traffic, dict[str, Any]]]:
    """What fully_shard really sent on four ranks: bytes by ring's formula from each collective that rank 0 issued."""
    cases = [(2, 2, True), (2, 2, False), (1, 4, True)]
    run = run_ranks(_fully_sharded, cases, ranks=4)
    told, at, log = [], 0, [c for c in run.collectives if c.rank == 0]
    steps: list[list[Any]] = [[]]
    for collective in log:
        if collective.kind == "barrier":
            steps.append([])
        else:
            steps[-1].append(collective)
    for (replicate, shard, reshard), (parameters, _) in zip(cases, run.results[0], strict=True):
        step = steps[1 + 2 * at]
        groups = [result[at][1] for result in run.results]
        inside = sum(c.wire_bytes for c in step if c.kind in ("all_gather", "reduce_scatter"))
        across = sum(c.wire_bytes for c in step if c.kind == "all_reduce")
        told.append((Traffic(parameters, replicate, shard, reshard), {"groups": groups, "bytes": [inside, across]}))
        at += 1
    return told


def _fully_sharded(cases: list[tuple[int, int, bool]]) -> list[tuple[int, list[list[int]]]]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    told = []
    for replicate, shard, reshard in cases:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        parameters = sum(p.numel() for p in model.parameters())
        grid = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
        mesh = grid if replicate > 1 else grid["shard"]
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        dist.barrier()
        model(torch.ones(2, 64)).sum().backward()
        dist.barrier()
        members = [dist.get_process_group_ranks(grid.get_group(name)) for name in ("shard", "replicate")]
        told.append((parameters, members))
    return told
