"""Lab 6, exercise 7: hybrid sharding: who shares with whom, and what a rank sends to each of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed, number, phases, returned, run_ranks
from course_checks.lab06.common import lab

Case = tuple[int, int, int, int, bool]  # rank, replicate, shard, parameters, reshard_after_forward
NAMES = ("the shard group", "the replicate group", "bytes inside the shard group", "bytes across the replicas")
REAL = ((1, 4, True), (4, 1, True), (2, 2, False), (2, 2, True))  # replicate, shard, reshard of four real ranks
SLIPS = {
    "order": "give the shard group first",
    "swapped": "ranks of one machine are neighbours, so replicate comes first in the mesh, and shard last",
    "no ring": "in a ring of n ranks each sends n-1 of n parts",
    "once": "an all-reduce is a reduce-scatter and an all-gather",
    "whole": "after the reduce-scatter a rank has only its shard of the gradients left to all-reduce",
    "gathered once": "with reshard_after_forward, backward gathers once more",
    "gathered twice": "without reshard_after_forward, the weights stay whole until backward",
    "fp32": "weights are gathered in param_dtype, 2 bytes each",
    "bf16": "gradients are summed in reduce_dtype, 4 bytes each",
    "no gradients": "gradients are reduce-scattered inside the shard group, too",
}


def right(case: Case, slips: tuple[str, ...] = ()) -> list[Any]:
    """The answer, right or with slips: rows and columns of arange(ranks).view(replicate, shard), and rings' bytes."""
    rank, replicate, shard, parameters, reshard = case
    row, column = divmod(rank, shard)
    groups = [[row * shard + i for i in range(shard)], [i * shard + column for i in range(replicate)]]
    if "swapped" in slips:
        row, column = divmod(rank, replicate)
        groups = [[i * replicate + column for i in range(shard)], [row * replicate + i for i in range(replicate)]]
        replicate, shard = shard, replicate
    inside, across = ((n - 1) / n if "no ring" not in slips else float(n > 1) for n in (shard, replicate))
    gathers = 1 if "gathered once" in slips else 2 if "gathered twice" in slips else 1 + reshard
    weights, gradients = parameters * (4 if "fp32" in slips else 2), parameters * (2 if "bf16" in slips else 4)
    inside *= gathers * weights + gradients * ("no gradients" not in slips)
    across *= (2 - ("once" in slips)) * (gradients if "whole" in slips else gradients / shard)
    return [*(groups[::-1] if "order" in slips else groups), inside, across]


def on_a_rank(width: int) -> list[tuple[int, list[list[int]]]]:
    """A training step of three units on each mesh; (parameters, the ranks of both groups)."""
    seen, policy = [], MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for replicate, shard, reshard in REAL:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
        parameters = sum(p.numel() for p in model.parameters())
        mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
        for module in [*model, model]:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        dist.barrier()
        model(torch.ones(2, width)).sum().backward()
        dist.barrier()
        seen.append((parameters, [dist.get_process_group_ranks(mesh.get_group(i)) for i in (1, 0)]))
    return seen


@lab.exercise("Stretch: hybrid sharding", importance=3, difficulty=3, minutes=15)
def hybrid(hybrid: Callable[..., Any]) -> str:
    """Groups and bytes by the formula on random meshes, and as fully_shard has and sends them on four real ranks."""
    seed = fresh_seed()
    draw = random.Random(seed)
    meshes = [(3, 5), (1, 6), (6, 1), *((draw.randint(2, 6), draw.randint(2, 9)) for _ in range(8))] * 2
    cases = [
        (draw.randrange(r * s), r, s, 151_200 * draw.randint(5, 5000), i % 2 == 0) for i, (r, s) in enumerate(meshes)
    ]  # every replicate x shard divides these parameters
    with named_seed(seed):
        answers = [_asked(hybrid, case) for case in cases]
        for i, yours in enumerate(map(list, zip(*answers, strict=True))):
            slip = next((words for slip, words in SLIPS.items() if _made(slip, yours, cases, i)), None)
            for case, answer in zip(cases, yours, strict=True):
                contract = Contract({slip: lambda _: True} if slip else {}, about=_shown(case))
                contract.values(NAMES[i], answer, right(case)[i], rtol=1e-9, atol=0.5)
    run = run_ranks(on_a_rank, 4 * draw.randint(10, 40), ranks=4)
    for rank, results in enumerate(run.results):
        for i, ((replicate, shard, reshard), (parameters, groups)) in enumerate(zip(REAL, results, strict=True)):
            case, step = (rank, replicate, shard, parameters, reshard), phases(run, rank)[1 + 2 * i]
            across = sum(c.wire_bytes for c in step if c.kind == "all_reduce")
            measured = [*groups, sum(c.wire_bytes for c in step) - across, across]
            contract = Contract(about=f"fully_shard on four real ranks, {_shown(case)}")
            for what, answer, seen in zip(NAMES, _asked(hybrid, case), measured, strict=True):
                contract.values(what, answer, seen, rtol=1e-9, atol=0.5)
    sent = f"on {replicate}x{shard} each sent {measured[2]:,.0f} bytes inside and {across:,.0f} across"
    return f"{len(cases)} random cases, and four real ranks on {len(REAL)} meshes; {sent}"


def _asked(hybrid: Callable[..., Any], case: Case) -> list[Any]:
    answer = returned(hybrid(*case), tuple, f"({', '.join(NAMES)})")
    if len(answer) != 4:
        raise NotYet(f"{_shown(case)}: give ({', '.join(NAMES)}), not {answer}")
    return [[int(rank) for rank in group] for group in answer[:2]] + [number(n, NAMES[2]) for n in answer[2:]]


def _made(slip: str, yours: list[Any], cases: list[Case], i: int) -> bool:
    """Whether answer i to each case is the one with this slip."""
    made = [right(case, (slip,))[i] for case in cases]
    return yours == made if i < 2 else all(map(math.isclose, yours, made))


def _shown(case: Case) -> str:
    return "rank {} on {}x{} ranks, {:,} parameters, reshard_after_forward={}".format(*case)
