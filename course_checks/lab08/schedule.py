"""Lab 8, exercise 2: a pipeline's schedule that beats 1F1B in the memory it is given, simulated and then on real ranks."""

from __future__ import annotations

import csv
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

from course_checks.harness import ATOL, RTOL, Contract, NotYet, fresh, fresh_seed, plain, returned, run_ranks
from course_checks.lab08.common import lab
from course_lib.parallel.schedules import Action, Orders, orders
from course_lib.parallel.simulate import Timeline, simulate

SHAPES = ((4, 8), (3, 5), (2, 1), (4, 2), (1, 3), (8, 16))
ON_RANKS = (4, 6)
WIDTH, ROWS = 16, 2
TIME, MEMORY, ORDER = "time", "memory", "order"


class Case(NamedTuple):
    """Stages of equal work; F, B and W take 1 second each, a send none."""

    stages: int
    micro_batches: int
    room: list[int]  # micro-batches that each rank may hold

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.micro_batches} micro-batches, room for {self.room}"

    @property
    def bound(self) -> int:
        """Seconds that no schedule beats.

        The last rank waits p - 1 seconds and has 3 m to do. Rank 0 ends its first B after 2 p, with 2 m - 1 to do.
        """
        return self.micro_batches + max(2 * self.micro_batches + self.stages, self.micro_batches + 2 * self.stages) - 1


def reference(case: Case) -> Orders:
    """1F1B with split backwards; rank r runs each W as many backwards late as it has room for, up to r: ZB-H1 and less."""
    result = []
    for rank, order in enumerate(orders("1f1b", *case[:2])):
        late = min(case.room[rank] - (case.stages - rank), rank)
        after = {i: [Action("W", i - late)] for i in range(late, case.micro_batches)}
        split = [
            each for action in order for each in (action, *after.get(action.micro_batch, []) * (action.kind == "B"))
        ]
        result.append(split + [Action("W", i) for i in range(max(case.micro_batches - late, 0), case.micro_batches)])
    return result


def timed(mine: Orders) -> Timeline:
    return simulate(mine, forward=1, backward=1, weight=1)


def warm_up(order: list[Action]) -> int:
    """Forwards before the first backward."""
    return next((n for n, action in enumerate(order) if action.kind != "F"), len(order))


HINTS = {
    "that is GPipe: run a backward as soon as one can run": lambda f: (
        f["clause"] == MEMORY and all(warm_up(order) == f["case"].micro_batches for order in f["orders"])
    ),
    "one micro-batch goes all the way and back before the next begins, and so one rank works at a time": lambda f: (
        f["clause"] == TIME and all(warm_up(order) == 1 for order in f["orders"][:-1]) and len(f["orders"]) > 1
    ),
    "that is 1F1B: now split the backward, and let W wait where there is room": lambda f: (
        f["clause"] == TIME and f["one_f_one_b"]
    ),
    "a W that waits is one more micro-batch held": lambda f: f["clause"] == MEMORY and not f["whole"],
    "a later stage begins with fewer forwards than the one before it": lambda f: any(
        warm_up(a) < warm_up(b) for a, b in zip(f["orders"], f["orders"][1:], strict=False)
    ),
    "which rank idles at the end, and which W could it have saved for that time?": lambda f: (
        f["clause"] == TIME and not f["whole"]
    ),
}


@lab.exercise("Beat 1F1B", importance=4, difficulty=4, minutes=25)
def beat_1f1b(schedule: Callable[..., Any]) -> str:
    """As fast as the reference in 1F1B's memory and in more, a score in other memory; one process's gradients on four real ranks."""
    seed = fresh_seed()
    draw, apart, told = random.Random(seed), [], []
    for stages, micro_batches in SHAPES:
        least = [stages - rank for rank in range(stages)]
        for room in (least, [stages] * stages):
            case = Case(stages, micro_batches, room)
            told.append(_judged(_orders(schedule(*case), case), case, timed(reference(case)).seconds))
        for _ in range(2):
            case = Case(stages, micro_batches, [held + draw.randint(0, rank + 1) for rank, held in enumerate(least)])
            line = _judged(_orders(schedule(*case), case), case, timed(orders("1f1b", *case[:2])).seconds)
            apart.append(line.seconds - timed(reference(case)).seconds)
    case = Case(*ON_RANKS, [ON_RANKS[0]] * ON_RANKS[0])
    mine = _orders(schedule(*case), case)
    _judged(mine, case, case.bound)
    for rank, (yours, expected) in enumerate(run_ranks(on_a_rank, mine, case.micro_batches, seed, ranks=4).results):
        Contract().values(f"on real ranks, stage {rank}: the gradient", yours, expected, rtol=RTOL, atol=ATOL)
    stages, micro_batches = SHAPES[0]
    return (
        f"simulated, {stages} stages and {micro_batches} micro-batches: 1F1B takes "
        f"{timed(orders('1f1b', stages, micro_batches)).seconds:g} s; yours {told[0].seconds:g} s in the same memory, and "
        f"{told[1].seconds:g} s, the bound, with room for {stages} on every rank. Your score, with other room: of "
        f"{len(apart)} pipelines {sum(each < 0 for each in apart)} faster than our own schedule, "
        f"{sum(each == 0 for each in apart)} as fast, and {sum(max(each, 0) for each in apart):g} s lost in all. On four real "
        "ranks: one process's gradients"
    )


def _orders(value: Any, case: Case) -> Orders:
    value = returned(value, (list, tuple), "the schedule")
    if len(value) != case.stages:
        raise NotYet(f"{case}: give one list of actions for each rank, {case.stages}, not {len(value)}")
    mine = [[_action(action) for action in order] for order in value]
    contract = Contract(HINTS, {"orders": mine}, str(case))
    try:
        timed(mine)
    except ValueError as error:
        raise contract.broken(str(error).rstrip("."), ORDER) from None
    contract.holds(not any(a.chunk for order in mine for a in order), "each rank has one stage: there is only chunk 0")
    last = max(action.micro_batch for action in mine[0])
    contract.holds(
        last == case.micro_batches - 1, f"the last micro-batch is {last}, and should be {case.micro_batches - 1}"
    )
    return mine


def _action(value: Any) -> Any:
    """An Action, if it is something of the kind; `simulate` has a sentence for the rest."""
    return Action(*plain(tuple(value))) if isinstance(value, tuple) and len(value) in (2, 3) else value


def _judged(mine: Orders, case: Case, most: float) -> Timeline:
    line = timed(mine)
    whole = not any(action.kind == "W" for action in mine[0])
    slow = timed(orders("1f1b", *case[:2])).seconds
    facts = {"case": case, "orders": mine, "whole": whole, "one_f_one_b": whole and line.seconds == slow}
    contract = Contract(HINTS, facts, str(case))
    for rank, (held, room) in enumerate(zip(line.in_flight, case.room, strict=True)):
        contract.holds(
            held <= room, f"rank {rank} holds {held:g} micro-batches at a time, and has room for {room}", MEMORY
        )
    told = f"your orders take {line.seconds:g} s, 1F1B {slow:g} s, and {most:g} s are possible"
    contract.holds(line.seconds <= most + 1e-6, told, TIME)
    return line


def on_a_rank(mine: Orders, micro_batches: int, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This stage's gradients when PyTorch's runtime runs the orders, and when one process computes all of them."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))
    x, target = (fresh((micro_batches * ROWS, WIDTH), seed, i) for i in range(2))
    own = dict(model[rank].named_parameters())
    expected = dict(zip(own, torch.autograd.grad(mse_loss(model(x), target), list(own.values())), strict=True))
    stage = PipelineStage(model[rank], rank, stages, torch.device("cpu"))
    runtime = _PipelineScheduleRuntime([stage], n_microbatches=micro_batches, loss_fn=mse_loss)
    split = any(action.kind == "W" for action in mine[0])
    words = {"F": "F", "W": "W", "B": "I" if split else "B"}  # PyTorch calls the input's half I, and the whole B
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "orders.csv")
        with file.open("w", newline="") as lines:
            rows = ([f"{r}{words[a.kind]}{a.micro_batch}" for a in order] for r, order in enumerate(mine))
            csv.writer(lines).writerows(rows)
        runtime._load_csv(str(file))
    runtime.step(*[x] * (rank == 0), target=target)
    return {name: parameter.grad for name, parameter in own.items()}, expected
