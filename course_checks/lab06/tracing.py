"""Lab 6, exercise 5: from the traces of all ranks, where they wait longest, and which change would save most."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed, number, returned, run_ranks
from course_checks.lab06.common import lab
from course_lib.observe.trace import Span, trace_step

Trace = list[Span]
Answer = tuple[str, str, float]
CHANGES = ("balance", "prefetch", "bf16")
TOLERANCE = 1e-4  # seconds: a clock of 1.7e9 seconds is good to a few 1e-7, and they add up
LATE_RANK, LATE = 1, 0.15
# what a case shows -> its ranks, in rows: labels of units, gathers (each a letter), and compute
CASES = {
    "rank 1 computes longer, and the others wait": (
        ("0001111111111111", "a..bbbbbbbbbbb..", ".FF...........FF"),
        ("0000000000000111", "a............b..", ".FFFFFFFFFFFF.FF"),
        ("0000111111111111", "a...bbbbbbbbbb..", ".FFF..........FF"),
    ),
    "another rank is late for each unit": (
        ("00000000111111111122", "a.......b.........c.", ".FFFFFFF.FFFFFFFFF.F"),
        ("00011111111111111122", "a..bbbbbb.........c.", ".FF......FFFFFFFFF.F"),
        ("00011111111222222222", "a..bbbbbb..cccccccc.", ".FF......FF........F"),
    ),
    "gathers and compute take turns": (("0000001111111222222", "aa....bbbb...cc....", "..FFFF....FFF..FFFF"),) * 2,
    "long gathers, and little to compute": (("00000111111122222", "aaaa.bbbbbb.cccc.", "....F......F....F"),) * 2,
    "a gather begins in unit 0, beside compute, and is waited for in unit 1": (
        ("0000000111111111122", "aaabbbbbbbbbbcccc..", "...FFFF......FFFFFF"),
        ("0000000111111111122", "aaa..bbbbbbbbcccc..", "...FFFF......FFFFFF"),
    ),
    "two gathers at once, and a rank that is late for the second": (
        ("000011111111111111111", "aaaa.................", "..bbbbbbbbb..........", "...........FFFFFFFFFF"),
        ("000011111111111111111", "aaaa.................", ".......bbbb..........", "....FFF....FFF......."),
    ),
    "each unit is called twice": (("0000001100000111111", "aaa.bb..ccc..dddd..", "...FFFFF...FF....FF"),) * 2,
}
SLIPS = {
    "until the last rank has begun the gather it is waiting, and not transfer": "no waiting",
    "where two gathers run, it is transfer as soon as the last rank has begun one of them": "all begun",
    "a gather can hide beside no more compute than there is": "no limit",
    "compute that has a gather beside it already is taken": "beside",
    "take the smaller one on each rank, and then the mean": "mean first",
    "take the mean over the ranks, not the sum": "sum",
    "add a unit's exposed seconds up, over its pieces and over the ranks": "one rank's",
}


@dataclass(frozen=True)
class Piece:
    """A stretch of a rank's time in which nothing begins or ends, there or at the last rank."""

    seconds: float
    gathers: frozenset[int]  # numbers of those that run on this rank, in the order in which all ranks make them
    begun: frozenset[int]  # those of them that the last rank has begun, too
    computes: bool  # whether something computes on this rank; a gather's own copies do not count
    unit: str  # the label that it lies in, such as "layers.2"; "" outside of all


def pieces(traces: list[Trace]) -> list[list[Piece]]:
    """Cut each rank's trace of a forward pass wherever one of its spans or the last rank's gather begins or ends."""
    gathers = [[span for span in spans if span.kind == "collective"] for spans in traces]
    last = [max(span.start for span in same) for same in zip(*gathers, strict=True)]
    ranks = []
    for spans, moving in zip(traces, gathers, strict=True):
        threads = {span.thread for span in moving}  # what runs there is a gather's copy
        cut = []
        for a, b in pairwise(sorted({t for span in spans for t in (span.start, span.end)} | {*last})):
            here = [span for span in spans if span.start <= a and b <= span.end]
            running = frozenset(k for k, span in enumerate(moving) if span in here)
            computes = any(span.kind == "forward" and span.thread not in threads for span in here)
            unit = next((span.name for span in here if span.name.startswith("layers.")), "")
            cut.append(Piece(b - a, running, frozenset(k for k in running if last[k] <= a), computes, unit))
        ranks.append(cut)
    return ranks


def made_up(ranks: tuple[tuple[str, ...], ...], generator: random.Random) -> list[Trace]:
    """The traces of a drawing, each of whose columns takes a random time from a random moment on."""
    scale, columns = generator.uniform(0.02, 0.5), max(len(row) for rows in ranks for row in rows)
    widths = [scale * generator.uniform(0.85, 1.15) for _ in range(columns)]
    edges = list(accumulate(widths, initial=1.7e9 + generator.uniform(0, 1e6)))

    def span(stretch: re.Match) -> Span:
        name, kind, thread = "gloo:all_gather", "collective", 20
        if stretch[1] == "F":
            name, kind, thread = "forward", "forward", 10
        elif stretch[1].isdigit():
            name, kind, thread = f"layers.{stretch[1]}", "other", 10
        return Span(name, kind, edges[stretch.start()], edges[stretch.end()], thread)

    stretches = [[stretch for row in rows for stretch in re.finditer(r"([^.])\1*", row)] for rows in ranks]
    return [sorted(map(span, each), key=lambda s: s.start) for each in stretches]


def look(ranks: list[list[Piece]], slip: str = "") -> tuple[Counter, dict[str, float]]:
    """(exposed seconds by unit, what each change saves at most), right or with a slip."""
    units, seconds = Counter(), {"waiting": [], "transfer": [], "free": []}
    for rank in ranks:
        here = Counter()
        for each in seconds.values():
            each.append(0.0)
        for piece in rank:
            if piece.computes:
                seconds["free"][-1] += piece.seconds * (not piece.gathers or slip == "beside")
            elif piece.gathers:
                begun = piece.gathers == piece.begun if slip == "all begun" else piece.begun
                seconds["transfer" if begun or slip == "no waiting" else "waiting"][-1] += piece.seconds
                here[piece.unit] += piece.seconds
        units = (units | here) if slip == "one rank's" else units + here
    hidden = list(map(min, seconds["transfer"], seconds["free"]))
    saved = {"balance": sum(seconds["waiting"]), "prefetch": sum(hidden), "bf16": sum(seconds["transfer"]) / 2}
    if slip == "no limit":
        saved["prefetch"] = sum(seconds["transfer"])
    if slip == "mean first":
        saved["prefetch"] = min(sum(seconds["transfer"]), sum(seconds["free"]))
    return units, {change: total / (1 if slip == "sum" else len(ranks)) for change, total in saved.items()}


class Chain(nn.Sequential):
    """Units with labels; the late rank computes for longer before the third."""

    def forward(self, x: torch.Tensor, late: float = 0.0) -> torch.Tensor:
        for index, layer in enumerate(self):
            until = time.perf_counter() + late * (index == 2 and dist.get_rank() == LATE_RANK)
            while time.perf_counter() < until:
                x.detach() @ x.detach().T
            with torch.profiler.record_function(f"layers.{index}"):
                x = layer(x).relu()
        return x


def on_a_rank() -> list[Trace]:
    """This rank's spans of the forward pass in one training step, without and with prefetch."""
    traces, mesh, x = [], init_device_mesh("cpu", (dist.get_world_size(),)), torch.ones(512, 512)
    for prefetch in (False, True):
        model = Chain(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        for module in [*model, model]:
            fully_shard(module, mesh=mesh)
        if prefetch:
            for layer, following in pairwise(model):
                layer.set_modules_to_forward_prefetch([following])
            model._set_unshard_async_op(True)  # without a second stream, as on a CPU, nothing overlaps otherwise
        model(x).sum().backward()
        dist.barrier()
        spans = trace_step(lambda: model(x, LATE).sum().backward())  # noqa: B023
        backward = min(s.start for s in spans if s.kind == "backward")
        traces.append([s for s in spans if s.start < backward])
    return traces


def record() -> dict[str, list[Trace]]:
    """All ranks' traces of fully_shard on three ranks, of which rank 1 has more to compute."""
    without, prefetched = zip(*run_ranks(on_a_rank, ranks=3).results, strict=True)
    return {"fully_shard without prefetch": list(without), "fully_shard with prefetch": list(prefetched)}


@lab.exercise("What would you change first?", importance=4, difficulty=2, minutes=15)
def first_change(first_change: Callable[..., Any]) -> str:
    """Made-up traces, then two of fully_shard on three real ranks."""
    seed = fresh_seed()
    generator = random.Random(seed)
    cases = {shows: pieces(made_up(ranks, generator)) for shows, ranks in CASES.items()}
    with named_seed(seed):
        answers = {shows: _asked(first_change, ranks, shows) for shows, ranks in cases.items()}
        contract = Contract({hint: lambda _, slip=slip: _made(slip, cases, answers) for hint, slip in SLIPS.items()})
        for shows, ranks in cases.items():
            _right(contract, shows, answers[shows], ranks)
    evidence = f"{len(cases)} made-up traces, and 3 real ranks, of which rank {LATE_RANK} computes longer"
    for shows, traces in record().items():
        ranks = pieces(traces)
        unit, change, seconds = _asked(first_change, ranks, shows)
        _right(contract, shows, (unit, change, seconds), ranks)
        evidence += f"; {shows}: {change} saves {seconds:.2f} s at most, most is exposed in {unit}"
    return evidence


def _asked(first_change: Callable[..., Any], ranks: list[list[Piece]], shows: str) -> Answer:
    value = returned(first_change(ranks), tuple, "(unit, change, seconds)")
    if len(value) != 3 or value[1] not in CHANGES:
        raise NotYet(f"{shows}: give (unit, change, seconds), with one of {', '.join(CHANGES)}, not {value}")
    return returned(value[0], str, "the unit"), value[1], number(value[2], "the seconds")


def _made(slip: str, cases: dict[str, list[list[Piece]]], answers: dict[str, Answer]) -> bool:
    for shows, ranks in cases.items():
        (unit, change, seconds), (units, saved) = answers[shows], look(ranks, slip)
        right = change == max(saved, key=saved.get) and units[unit] == max(units.values(), default=0)
        if not right or abs(seconds - saved[change]) > TOLERANCE:
            return False
    return True


def _right(contract: Contract, shows: str, given: Answer, ranks: list[list[Piece]]) -> None:
    (unit, change, seconds), (units, saved), contract.about = given, look(ranks), shows
    contract.values(f"what {change!r} saves at most", seconds, saved[change], rtol=0, atol=TOLERANCE)
    best, longest = max(saved, key=saved.get), max(units, key=units.get)
    sentence = f"{change!r} saves {seconds:.3f} s at most, and {best!r} {saved[best]:.3f} s"
    contract.holds(saved[change] >= saved[best] - TOLERANCE, sentence)
    sentence = f"{longest} has {units[longest]:.3f} exposed seconds over all ranks, your {unit!r} {units[unit]:.3f}"
    contract.holds(units[unit] >= units[longest] - TOLERANCE, sentence)
