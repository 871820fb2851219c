"""Lab 3, exercise 4: five programs that hang. They stand in the notebook; here is what each gets, and what it owes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed
from course_checks.lab03.common import OUTSIDE, Hung, in_turn, in_your_words, lab, run, values
from course_lib.launch import RanksHung, launch

NAMES = ("shift", "logged", "loaded", "trained", "guarded")
PATIENCE = 1.5  # seconds until `show` calls it a hang
HINTS = {
    "the rank that is not where the others wait is the one to read": lambda f: (
        f["clause"] == "hang" and not f["everyone"]
    ),
    "a rank without a batch must still take part, with nothing to add": lambda f: (
        f["name"] == "trained" and f["clause"] == "length"
    ),
    "all ranks must come to the same decision, so they have to talk before it": lambda f: f["clause"] == "None",
}


def inputs(name: str, seed: int, rank: int, ranks: int) -> tuple[Any, ...]:
    """What a rank's call gets; the same for each call with this seed."""
    if name == "trained":
        counts = [(seed + r) % 3 for r in range(ranks)]  # neighbours differ, and some have none
        return ([values(5, seed + i, rank) * (i != 1) for i in range(counts[rank])],)  # one adds up to nothing
    if name == "guarded":
        losses = (1.25 + rank, float("nan"), float("inf"), -float("inf"), 3e38)  # the last: finite, and not their sum
        odd = losses[0] if seed % 5 < 4 and rank != seed % ranks else losses[seed % 5]
        return torch.tensor(odd), values(64, seed, rank)
    if name == "loaded":
        return values(64, seed, rank), torch.tensor([3.0 + rank])
    return (values(64, seed, rank),) if name == "shift" else (values(1, seed, rank)[0],)


def owed(name: str, seed: int, rank: int, ranks: int) -> Any:
    """What the program should return on this rank."""
    given = [inputs(name, seed, r, ranks) for r in range(ranks)]
    if name == "shift":
        return given[rank - 1][0]
    if name == "logged":
        return sum(loss for (loss,) in given) / ranks if rank == 0 else None
    if name == "loaded":
        return {"weights": given[0][0], "rows": sum(rows for _, rows in given)}
    if name == "trained":
        steps = max(len(batches) for (batches,) in given)
        return [float(sum(b[i].sum() for (b,) in given if i < len(b))) for i in range(steps)]
    if not all(loss.isfinite() for loss, _ in given):
        return None
    return sum(gradient for _, gradient in given) / ranks


def on_a_rank(programs: type, name: str, seeds: Sequence[int]) -> list[Any]:
    results = []
    for seed in seeds:
        with in_turn():
            results.append(getattr(programs(), name)(*inputs(name, seed, dist.get_rank(), dist.get_world_size())))
        dist.barrier()  # a rank that goes on while others wait has not finished
    return results


def show(programs: type) -> None:
    """Run each of the five on three ranks until it hangs, and print what `launch` reports."""
    for name in NAMES:
        try:
            launch(on_a_rank, programs, name, [11], ranks=3, timeout=PATIENCE, backend="gloo", threads=1, quiet=True)
            print(f"{name}: no hang this time\n")
        except RanksHung as error:
            print(f"{name}: {in_your_words(error)}\n")


@lab.exercise("Five programs that hang", importance=5, difficulty=3, minutes=20)
def repaired(parts: Callable[[], Any]) -> str:
    """Each returns what it owes on 3 and 4 ranks, for five inputs each, and waits for its messages."""
    programs, seed = parts(), fresh_seed()
    if not inspect.isclass(programs) or any(not callable(getattr(programs, name, None)) for name in NAMES):
        raise NotYet(f"return the class itself, a subclass of Programs with {', '.join(NAMES)}")
    with named_seed(seed):
        for name in NAMES:
            for ranks in (3, 4):
                _right(programs, name, range(seed, seed + 5), ranks)
    return "five programs on 3 and 4 ranks, for five inputs each"


def _right(programs: type, name: str, seeds: Sequence[int], ranks: int) -> None:
    contract = Contract(HINTS, {"name": name}, f"{name} on {ranks} ranks")
    try:
        by_rank = run(on_a_rank, programs, name, seeds, ranks=ranks)
    except Hung as error:
        contract.facts["everyone"] = OUTSIDE in str(error)
        raise contract.broken(str(error), "hang") from None
    for rank, results in enumerate(by_rank):
        for seed, result in zip(seeds, results, strict=True):
            expected, what = owed(name, seed, rank, ranks), f"what rank {rank} returns"
            if expected is None or result is None:
                contract.holds(
                    result is expected, f"{what} is {str(result)[:60]}, and should be {str(expected)[:60]}", "None"
                )
            elif name == "trained":
                result = list(result)
                told = f"{what} has {len(result)} sums, and should have {len(expected)}"
                contract.holds(len(result) == len(expected), told, "length")
                contract.values(what, [float(total) for total in result], expected, rtol=1e-5)
            elif name == "loaded" and not isinstance(result, dict):
                contract.values(what, dict(zip(expected, result, strict=False)), expected, rtol=1e-6)
            else:
                contract.values(what, result, expected, rtol=1e-6)
