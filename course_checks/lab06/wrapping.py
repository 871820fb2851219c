"""Lab 6, exercise 2: which layers make one unit, and how much memory that takes at its peak."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from course_checks.harness import NotYet, close, named_mistake, returned, run_ranks
from course_checks.lab06.common import lab
from course_lib.memory.states import fsdp_peak_parameters


class Peak(NamedTuple):
    """One question about the peak: elements of the units in the order of forward, and of what no unit took."""

    units: tuple[int, ...]
    root: int
    shards: int
    prefetch: bool


PEAKS = (
    Peak((400, 800, 640, 160), 240, 4, False),
    Peak((400, 800, 160, 640), 240, 4, True),  # the two largest are no neighbours
    Peak((120, 120, 900), 3000, 2, True),
    Peak((5000,), 0, 8, True),
    Peak((700, 300, 200), 100, 1, False),
    Peak((1000, 600, 800, 1200, 90), 513, 8, True),
)
MISTAKES = {
    "root": "forgets the root unit: what no unit took (embedding, norm, head) is gathered when forward begins and stays",
    "root at rest": "leaves the root unit out of what lies sharded: fully_shard(model) shards it as well",
    "all": "gathers all units at once: after a unit's forward its parameters are freed again",
    "not sharded": "does not divide what lies at rest by the number of shards",
    "nothing at rest": "counts what is gathered alone: the shards of all the others stay where they are",
    "two largest": "adds the two largest units; what is in memory together are two neighbours",
    "no prefetch": "leaves the prefetch out: with it the next unit is there while one computes",
    "prefetch": "counts the next unit although nothing is prefetched",
    "average": "takes the mean unit where the largest decides",
    "gathered share": "takes 1/shards of the gathered unit away: the shard lies beside its gathered copy",
}


class Plan(NamedTuple):
    """One question about wrapping: the most elements that a GPU may hold, with the next unit prefetched."""

    layers: tuple[int, ...]
    root: int
    shards: int
    limit: int


PLANS = (
    Plan((100, 100, 100, 100, 100, 100), 200, 4, 800),
    Plan((100, 100, 100, 100, 100, 100), 200, 4, 1000),
    Plan((100, 100, 100, 100, 100, 100), 200, 4, 600),
    Plan((300, 100, 100, 50, 50, 400), 100, 2, 1150),
    Plan((900, 20, 20, 20, 20, 20, 20), 60, 8, 1130),
    Plan((64, 64, 64, 64, 512), 128, 4, 930),
    Plan((100, 100, 100), 100, 4, 10_000),
    Plan((100, 100, 100), 500, 4, 650),  # the root alone is too much
    Plan((800, 800), 0, 8, 1000),
)


@lab.exercise("Where to wrap", importance=4, difficulty=3, minutes=25)
def wrapping(peak_elements: Callable[..., Any], plan_units: Callable[..., Any]) -> str:
    """The peak by formula, as course_lib.memory and two real ranks have it; the fewest units that fit, by brute force."""
    yours = [peak_elements(list(case.units), case.root, case.shards, case.prefetch) for case in PEAKS]
    for case, mine in zip(PEAKS, yours, strict=True):
        what = f"the peak of units {case.units} and a root of {case.root} on {case.shards} ranks, prefetch {case.prefetch},"
        mine = returned(mine, (int, float), what)
        try:
            close(mine, true_peak(case), rtol=1e-9, atol=0.5, what=what)
        except NotYet as difference:
            mistake = named_mistake(yours, _mistaken, PEAKS, MISTAKES, join="; and it ", rtol=1e-6)
            raise NotYet(f"your peak {mistake}" if mistake else str(difference)) from None
    for plan in PLANS:
        _right_plan(plan_units, plan)
    units, root = (256, 128, 512, 64), 384
    resting, gathered = _on_two_ranks(units, root)
    predicted = returned(peak_elements(list(units), root, 2, False), (int, float), "the peak")
    close(
        predicted,
        resting + gathered,
        rtol=1e-9,
        atol=0.5,
        what=f"the peak of units {units}, as two real ranks hold them,",
    )
    return (
        f"six peaks and nine plans; fully_shard on 2 real ranks: {resting:,} elements at rest and {gathered:,} in full at most, "
        f"together your {predicted:,.0f}"
    )


def true_peak(case: Peak) -> float:
    """Elements: what lies sharded, the root in full, and the unit that computes (with the next one)."""
    pairs = [a + b for a, b in zip(case.units, case.units[1:], strict=False)]
    at_once = max(pairs) if case.prefetch and pairs else max(case.units)
    at_rest_and_largest = fsdp_peak_parameters([*case.units, *[case.root] * (case.root > 0)], case.shards)
    return at_rest_and_largest - max(*case.units, case.root) + case.root + at_once


def _mistaken(case: Peak, mistakes: tuple[str, ...]) -> float:
    units, root, shards = case.units, case.root, case.shards
    pairs = [a + b for a, b in zip(units, units[1:], strict=False)] or [max(units)]
    prefetch = "prefetch" in mistakes or (case.prefetch and "no prefetch" not in mistakes)
    at_once = float(max(pairs) if prefetch else max(units))
    if "two largest" in mistakes and prefetch:
        at_once = float(sum(sorted(units)[-2:]))
    if "average" in mistakes:
        at_once = sum(units) / len(units) * (1 + (prefetch and len(units) > 1))
    if "all" in mistakes:
        at_once = float(sum(units))
    gathered = at_once + (0 if "root" in mistakes else root)
    if "gathered share" in mistakes:
        gathered *= 1 - 1 / shards
    at_rest = sum(units) + (0 if "root at rest" in mistakes else root)
    if "nothing at rest" in mistakes:
        return gathered
    return at_rest / (1 if "not sharded" in mistakes else shards) + gathered


def _groups(layers: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    at, units = 0, []
    for count in counts:
        units.append(sum(layers[at : at + count]))
        at += count
    return tuple(units)


def fewest_units(plan: Plan) -> int | None:
    """By trying every way to cut the layers; None where none fits."""
    fits = []
    for cuts in product((False, True), repeat=len(plan.layers) - 1):
        counts = [1]
        for cut in cuts:
            counts = [*counts, 1] if cut else [*counts[:-1], counts[-1] + 1]
        if true_peak(Peak(_groups(plan.layers, counts), plan.root, plan.shards, True)) <= plan.limit:
            fits.append(len(counts))
    return min(fits, default=None)


def _right_plan(plan_units: Callable[..., Any], plan: Plan) -> None:
    shown = f"layers {plan.layers}, a root of {plan.root}, {plan.shards} ranks, at most {plan.limit} elements"
    wanted = fewest_units(plan)
    try:
        counts = plan_units(list(plan.layers), plan.root, plan.shards, plan.limit)
    except ValueError:
        if wanted is None:
            return
        raise NotYet(f"{shown}: you refuse, and {wanted} unit{'s' * (wanted > 1)} would fit") from None
    counts = list(returned(counts, (list, tuple), "the plan"))
    if not all(isinstance(count, int) and count > 0 for count in counts):
        raise NotYet(f"{shown}: give the number of layers of each unit, whole and above 0, not {counts}")
    if sum(counts) != len(plan.layers):
        raise NotYet(f"{shown}: units of {counts} layers are {sum(counts)} layers of {len(plan.layers)}")
    units = _groups(plan.layers, counts)
    peak = true_peak(Peak(units, plan.root, plan.shards, True))
    if wanted is None:
        raise NotYet(
            f"{shown}: {counts} peaks at {peak:,.0f}, and so does every other cut above the limit: raise ValueError"
        )
    if peak > plan.limit:
        raise NotYet(f"{shown}: units of {counts} layers hold {units} elements and peak at {peak:,.0f}: too much")
    if len(counts) > wanted:
        raise NotYet(
            f"{shown}: {counts} fits, and {wanted} unit{'s do' if wanted > 1 else ' does'} too: each unit more is one more "
            "all-gather to wait for, so take as few as fit"
        )


@functools.cache
def _on_two_ranks(units: tuple[int, ...], root: int) -> tuple[int, int]:
    """Elements of rank 0 of a real fully_shard model: in its shards, and the most that were in full at a time."""
    return run_ranks(_fully_sharded, units, root, ranks=2).results[0]


def _fully_sharded(units: tuple[int, ...], root: int) -> tuple[int, int]:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    class Layer(nn.Module):
        def __init__(self, elements: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(elements))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor)))
            return x + self.weight.sum()

    seen: list[int] = []
    model = nn.Sequential(*map(Layer, units), Layer(root))
    mesh = init_device_mesh("cpu", (2,))
    for layer in list(model)[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    at_rest = sum(p.to_local().numel() for p in model.parameters())
    model(torch.ones(1)).sum().backward()
    return at_rest, max(seen)
