"""Lab 6, exercise 5: from the traces of all ranks, where they wait longest, and which change would save most."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable
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
COMPUTE = {
    "F": 10,
    "G": 11,
    "~": 20,
}  # in the drawings: on which thread; "L" is another label, other letters are gathers
# what a case shows -> its ranks, each of them in rows; a digit is a unit's label
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
    "copies on the gathers' thread": (("0000011111111", "aaaa.bbbbbb..", ".~~~.~~~~~...", "....F......FF"),) * 3,
    "each unit is called twice": (("0000001100000111111", "aaa.bb..ccc..dddd..", "...FFFFF...FF....FF"),) * 2,
    "two threads, nested labels": (("0001111111", "L..LLLL...", "aa.bbbb...", "..F....FFF", "..G....GGG"),) * 2,
}
SLIPS = {
    "compute on a thread that has gathers is a copy, and belongs to them": "copies",
    "a label is no work, and hides nothing": "labels",
    "a moment in which two gathers run is one moment": "twice",
    "until the last rank has begun the gather it is waiting, and not transfer": "no waiting",
    "a gather can hide beside no more compute than there is": "no limit",
    "compute that has a gather beside it already is taken": "beside",
    "take the mean over the ranks, not the sum": "sum",
    "add a unit's exposed seconds up, over its calls and over the ranks": "one rank's",
}


def made_up(ranks: tuple[tuple[str, ...], ...], generator: random.Random) -> list[Trace]:
    """The traces of a drawing, each of whose columns takes a random time from a random moment on."""
    scale, columns = generator.uniform(0.02, 0.5), max(len(row) for rows in ranks for row in rows)
    widths = [scale * generator.uniform(0.85, 1.15) for _ in range(columns)]
    edges = list(accumulate(widths, initial=1.7e9 + generator.uniform(0, 1e6)))

    def span(piece: re.Match, rank: int) -> Span:
        mark, name, kind, thread = piece[1], "gloo:all_gather", "collective", 20
        if mark in COMPUTE:
            name, kind, thread = "forward", "forward", COMPUTE[mark]
        elif mark == "L" or mark.isdigit():
            name, kind, thread = "FSDP::all_gather (layers.0)" if mark == "L" else f"layers.{mark}", "other", 10
        thread = thread if rank % 2 == 0 else 30 - thread  # what gathers on one rank, computes on another
        return Span(name, kind, edges[piece.start()], edges[piece.end()], thread)

    pieces = [[piece for row in rows for piece in re.finditer(r"([^.])\1*", row)] for rows in ranks]
    return [sorted((span(p, rank) for p in each), key=lambda s: s.start) for rank, each in enumerate(pieces)]


def look(traces: list[Trace], slip: str = "") -> tuple[Counter, Counter]:
    """(exposed seconds by unit, what each change saves at most), right or with a slip."""
    gathers = [[s for s in spans if s.kind == "collective"] for spans in traces]
    begun = [max(s.start for s in same) for same in zip(*gathers, strict=True)]
    units, saved = Counter(), Counter()
    for spans, moving in zip(traces, gathers, strict=True):
        threads = set() if slip == "copies" else {s.thread for s in moving}
        kinds = ("forward", "other") if slip == "labels" else ("forward",)
        computing = [s for s in spans if s.kind in kinds and s.thread not in threads]
        labels = [s for s in spans if s.name.startswith("layers.")]
        seconds, here = Counter(), Counter()
        for a, b in pairwise(sorted({t for s in spans for t in (s.start, s.end)} | {*begun})):
            running = [start <= a for start, s in zip(begun, moving, strict=True) if s.start <= a and b <= s.end]
            if any(s.start <= a and b <= s.end for s in computing):
                seconds["free"] += (b - a) * (not running or slip == "beside")
            elif running:
                sort = "transfer" if any(running) or slip == "no waiting" else "waiting"
                seconds[sort] += (b - a) * (len(running) if slip == "twice" else 1)
                here.update({s.name: b - a for s in labels if s.start <= a and b <= s.end})
        units = (units | here) if slip == "one rank's" else units + here
        ranks, transfer = 1 if slip == "sum" else len(traces), seconds["transfer"]
        saved["balance"] += seconds["waiting"] / ranks
        saved["prefetch"] += (transfer if slip == "no limit" else min(transfer, seconds["free"])) / ranks
        saved["bf16"] += transfer / 2 / ranks
    return units, saved


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


@lab.exercise("What would you change first?", importance=4, difficulty=3, minutes=30)
def first_change(first_change: Callable[..., Any]) -> str:
    """Made-up traces with a catch each, then two of fully_shard on three real ranks."""
    seed = fresh_seed()
    generator = random.Random(seed)
    cases = {shows: made_up(ranks, generator) for shows, ranks in CASES.items()}
    with named_seed(seed):
        answers = {shows: _asked(first_change, traces, shows) for shows, traces in cases.items()}
        contract = Contract({hint: lambda _, slip=slip: _made(slip, cases, answers) for hint, slip in SLIPS.items()})
        for shows, traces in cases.items():
            _right(contract, shows, answers[shows], traces)
    sentence = f"{len(cases)} made-up traces, and 3 real ranks, of which rank {LATE_RANK} computes longer"
    for shows, traces in record().items():
        unit, change, seconds = _asked(first_change, traces, shows)
        _right(contract, shows, (unit, change, seconds), traces)
        sentence += f"; {shows}: {change} saves {seconds:.2f} s at most, most is exposed in {unit}"
    return sentence


def _asked(first_change: Callable[..., Any], traces: list[Trace], shows: str) -> Answer:
    value = returned(first_change(traces), tuple, "(unit, change, seconds)")
    if len(value) != 3 or value[1] not in CHANGES:
        raise NotYet(f"{shows}: give (unit, change, seconds), with one of {', '.join(CHANGES)}, not {value}")
    return returned(value[0], str, "the unit"), value[1], number(value[2], "the seconds")


def _made(slip: str, cases: dict[str, list[Trace]], answers: dict[str, Answer]) -> bool:
    for shows, traces in cases.items():
        (unit, change, seconds), (units, saved) = answers[shows], look(traces, slip)
        right = change == max(saved, key=saved.get) and units[unit] == max(units.values(), default=0)
        if not right or abs(seconds - saved[change]) > TOLERANCE:
            return False
    return True


def _right(contract: Contract, shows: str, given: Answer, traces: list[Trace]) -> None:
    (unit, change, seconds), (units, saved), contract.about = given, look(traces), shows
    contract.values(f"what {change!r} saves at most", seconds, saved[change], rtol=0, atol=TOLERANCE)
    best, longest = max(saved, key=saved.get), max(units, key=units.get)
    sentence = f"{change!r} saves {seconds:.3f} s at most, and {best!r} {saved[best]:.3f} s"
    contract.holds(saved[change] >= saved[best] - TOLERANCE, sentence)
    sentence = f"{longest} has {units[longest]:.3f} exposed seconds over all ranks, your {unit!r} {units[unit]:.3f}"
    contract.holds(units[unit] >= units[longest] - TOLERANCE, sentence)
