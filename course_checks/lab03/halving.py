"""Lab 3, exercise 2: an all-reduce of few messages where latency counts, and of few bytes where bandwidth does."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log2
from typing import Any, NamedTuple

import torch.distributed as dist

from course_checks.harness import Contract, fresh_seed, in_bytes, named_seed
from course_checks.lab03.common import ITEM, Seen, by_messages, equal, lab, run, values, watched

SUM = "the tensor afterwards"
HINTS = {
    "that is a ring: few bytes, but 2(n-1) messages": lambda f: f["messages"] == 2 * (f["ranks"] - 1) > f["allowed"],
    "in this case whole tensors are faster: fewer messages": lambda f: (
        f["clause"] == "messages" and f["messages"] == 2 * f["steps"] and f["allowed"] == f["steps"]
    ),
    "in this case halves are faster: fewer bytes": lambda f: (
        f["clause"] in ("messages", "bytes") and f["messages"] == f["steps"] < f["allowed"]
    ),
    "you keep one half and give the other away: n pieces are never sent one by one": lambda f: (
        f["clause"] == "messages"
    ),
    "a half that is given away is not needed again before the way back": lambda f: f["clause"] == "bytes",
    "it is the function's result, and the tensor itself is not": lambda f: f["clause"] == SUM and f["returned"],
    "it is as it was: the sum belongs into `x` itself": lambda f: f["clause"] == SUM and f["untouched"],
}


class Case(NamedTuple):
    numbers: int
    latency: float
    bandwidth: float
    halves: bool  # whether halving and doubling is faster than doubling


def cases(ranks: int, seed: int) -> list[Case]:
    """Far from the size where both take equally long, and 4 % to either side of it."""
    draw, steps, made = random.Random(seed + ranks), log2(ranks), []
    for far in (0.01, 0.96, 1.04, 100.0):
        numbers, bandwidth = ranks * draw.randrange(40, 400), draw.uniform(1e7, 1e8)
        saved = (steps - 2 * (ranks - 1) / ranks) * ITEM * numbers / bandwidth  # seconds, paid with `steps` latencies
        latency = far * (saved or 1e-6) / (steps or 1)
        made.append(Case(numbers, latency, bandwidth, steps > 1 and far < 1))
    return made


def on_a_rank(all_reduce: Callable[..., Any], given: list[Case], seed: int) -> list[Any]:
    rank, seen = dist.get_rank(), []
    for number, case in enumerate(given):
        x = values(case.numbers, seed + number, rank)
        alias = x.view(-1)  # in place means that its other names see the sum, too
        call = watched(lambda x=x, case=case: all_reduce(x, case.latency, case.bandwidth))
        seen.append((call, alias))
    return seen


@lab.exercise("Few messages or few bytes", importance=4, difficulty=4, minutes=30, keeps_inputs=False)
def all_reduce(your_all_reduce: Callable[..., Any]) -> str:
    """In place: log2 n messages of the whole tensor, or 2 log2 n that carry 2(n-1)/n of it, whichever is faster."""
    seed, said = fresh_seed(), ""
    with named_seed(seed):
        for ranks in (8, 4, 2, 1):
            given = cases(ranks, seed)
            results_by_rank = run(on_a_rank, your_all_reduce, given, seed, ranks=ranks)
            for rank, results in enumerate(results_by_rank):
                for number, (case, result) in enumerate(zip(given, results, strict=True)):
                    evidence = _right(case, *result, rank, ranks, seed + number)
                    said = said or evidence
    return said


def _right(case: Case, call: Seen, x: Any, rank: int, ranks: int, seed: int) -> str:
    steps, whole = int(log2(ranks)), ITEM * case.numbers
    expected = sum(values(case.numbers, seed, r) for r in range(ranks))
    sent, messages = sum(c.bytes for c in call.sends), len(call.sends)
    allowed = 2 * steps if case.halves else steps
    facts = {"ranks": ranks, "steps": steps, "messages": messages, "allowed": allowed}
    facts["untouched"] = bool((x == values(case.numbers, seed, rank)).all())
    facts["returned"] = getattr(call.result, "shape", None) == x.shape and bool((call.result == expected).all())
    about = f"{in_bytes(whole)} on {ranks} ranks, {case.latency * 1e6:.3g} µs and {case.bandwidth / 1e6:.3g} MB/s: rank {rank}"
    contract = Contract(HINTS, facts, about)
    by_messages(contract, call)
    equal(contract, SUM, x, expected)
    contract.holds(messages == allowed, f"sends {messages} messages, and {allowed} are fastest", "messages")
    least = 2 * (ranks - 1) / ranks * whole if case.halves else steps * whole
    contract.holds(sent == least, f"sends {in_bytes(sent)}, and should send {in_bytes(least)}", "bytes")
    both = f"{in_bytes(least)} in {messages} messages where bytes count, {steps} messages where latency does"
    return f"exact sums on 8, 4, 2 and 1 ranks; {ranks} ranks: {both}" if case.halves else ""
