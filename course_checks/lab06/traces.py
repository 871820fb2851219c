"""Lab 6, exercise 7: what a trace shows: how long a rank waits for the network, in which unit, and for whom."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from course_checks.harness import NotYet, close, returned, run_ranks
from course_checks.lab06.common import lab
from course_checks.lab06.trace_cases import EXPOSURES, UNIT, WAITING, Waiting
from course_lib.observe.trace import Span

COMPUTE = ("forward", "backward", "optimizer")
UNITS, LATE_RANK, LATE_BEFORE, LATE = 4, 1, 2, 0.3


@lab.exercise("What a trace shows", importance=4, difficulty=3, minutes=30)
def trace_reading(exposed_seconds: Callable[..., Any], waiting_unit: Callable[..., Any]) -> str:
    """Made-up traces with one catch each, then two of fully_shard on three real ranks, one of which comes late."""
    for case in EXPOSURES:
        mine = returned(exposed_seconds(_later(case.spans)), (int, float), "the exposed seconds")
        close(mine, case.seconds, rtol=0, atol=1e-4, what=f"{case.shows}: the exposed seconds")
    for waiting in WAITING:
        _right_waiting(waiting_unit([_later(trace) for trace in waiting.traces]), waiting)
    told = []
    for prefetch, traces in _recorded().items():
        how = "with the next unit prefetched" if prefetch else "without prefetch"
        for rank, trace in enumerate(traces):
            mine = returned(exposed_seconds(list(trace)), (int, float), "the exposed seconds")
            close(
                mine,
                true_exposed(trace),
                rtol=0,
                atol=1e-4,
                what=f"fully_shard {how}, rank {rank}: the exposed seconds",
            )
        unit, late = true_waiting(traces)
        _right_waiting(waiting_unit([list(t) for t in traces]), Waiting(f"fully_shard {how}", unit, late, list(traces)))
        told.append(f"{how} rank 0 waits {true_exposed(traces[0]):.2f} s, most of it in {unit}, for rank {late}")
    return f"nine small traces and three sets; fully_shard on 3 real ranks, one of them late: {'; '.join(told)}"


def _later(spans: Sequence[Span]) -> list[Span]:
    """Fresh copies at a time as of today: the clock of a real trace does not begin at 0."""
    return [Span(s.name, s.kind, s.start + 1.7e9, s.end + 1.7e9, s.thread) for s in spans]


def true_exposed(spans: Sequence[Span], within: tuple[float, float] = (float("-inf"), float("inf"))) -> float:
    """Seconds in which a collective ran and no thread but the collectives' own computed."""
    moving = [s for s in spans if s.kind == "collective"]
    computing = [s for s in spans if s.kind in COMPUTE and s.thread not in {c.thread for c in moving}]
    edges = {edge for s in [*moving, *computing] for edge in (s.start, s.end)} | {e for e in within if abs(e) < 1e300}
    cuts = sorted(edge for edge in edges if within[0] <= edge <= within[1])
    total = 0.0
    for start, end in zip(cuts, cuts[1:], strict=False):
        middle = (start + end) / 2
        if any(s.start <= middle < s.end for s in moving) and not any(s.start <= middle < s.end for s in computing):
            total += end - start
    return total


def true_waiting(traces: Sequence[Sequence[Span]]) -> tuple[str, int]:
    """(the unit in which some rank waits longest, the rank that waits least in all: the others wait for it)."""
    by_unit = {
        (rank, s.name): true_exposed(trace, (s.start, s.end))
        for rank, trace in enumerate(traces)
        for s in trace
        if s.kind == "other" and s.name.startswith(UNIT)
    }
    totals = [true_exposed(trace) for trace in traces]
    return max(by_unit, key=by_unit.__getitem__)[1], totals.index(min(totals))


def _right_waiting(value: Any, case: Waiting) -> None:
    value = returned(value, (tuple, list), "what waiting_unit gives")
    if len(value) != 2 or not isinstance(value[0], str) or not isinstance(value[1], int):
        raise NotYet(f"give the label of a unit and the number of a rank, like ('{UNIT}2', 1), not {value}")
    unit, rank = value
    totals = ", ".join(f"rank {r} {true_exposed(t):.2f} s" for r, t in enumerate(case.traces))
    if unit != case.unit:
        labels = [s.name for s in case.traces[0] if s.kind == "other" and s.name.startswith(UNIT)]
        if unit not in labels:
            raise NotYet(f"{case.shows}: {unit!r} is no label of a unit; they are {', '.join(labels)}")
        waits = [
            f"{s.name} {true_exposed(t, (s.start, s.end)):.2f} s"
            for t in case.traces[:1]
            for s in t
            if s.kind == "other" and s.name.startswith(UNIT)
        ]
        raise NotYet(
            f"{case.shows}: you say {unit}, and the longest wait is in {case.unit}. What counts is the exposed time inside each "
            f"label, of the rank that waits longest there (rank 0: {', '.join(waits)})"
        )
    if rank != case.rank:
        most = max(range(len(case.traces)), key=lambda r: true_exposed(case.traces[r]))
        raise NotYet(
            f"{case.shows}: you say rank {rank}, and the others wait for rank {case.rank}. "
            + ("Who waits longest is not who is late: the" if rank == most else "The")
            + f" late one finds everybody there and waits least ({totals})"
        )


@functools.cache
def _recorded() -> dict[bool, list[list[Span]]]:
    """Spans of each rank in one forward pass of fully_shard, without and with prefetch; rank 1 is late before unit 2."""
    told: dict[bool, list[list[Span]]] = {}
    for _ in range(2):  # on a very busy machine a rank may be late for reasons of its own; look once more
        run = run_ranks(_forward, ranks=3)
        told = {prefetch: [result[prefetch] for result in run.results] for prefetch in (False, True)}
        if (
            true_waiting(told[False]) == (f"{UNIT}{LATE_BEFORE}", LATE_RANK)
            and true_waiting(told[True])[1] == LATE_RANK
        ):
            break
    return told


def _forward() -> dict[bool, list[Span]]:
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from course_lib.observe.trace import trace_step

    rank, late = dist.get_rank(), 0.0

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(UNITS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                if rank == LATE_RANK and number == LATE_BEFORE:
                    time.sleep(late)
                with torch.profiler.record_function(f"{UNIT}{number}"):
                    x = layer(x).relu()
            return x

    told = {}
    x = torch.ones(256, 128)
    for prefetch in (False, True):
        model, late = Chain(), 0.0
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if prefetch:
            for layer, following in zip(model.layers, list(model.layers)[1:], strict=False):
                layer.set_modules_to_forward_prefetch([following])
            model._set_unshard_async_op(True)  # without a second stream, as on a CPU, nothing overlaps otherwise
        with torch.no_grad():
            model(x)
            dist.barrier()
            late = LATE
            told[prefetch] = trace_step(lambda: model(x))  # noqa: B023
    return told
