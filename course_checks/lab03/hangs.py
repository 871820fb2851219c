"""Lab 3, exercise 4: five programs that hang. They stand in the notebook; here is what each gets, and what it owes.

`in_turn` plays NCCL's rule on CPU ranks: what a rank starts outside a batch may run to its end before the next begins. It
is a simulation: gloo, which carries the messages, has no such rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed
from course_checks.lab03.common import Hung, in_your_words, lab, run, values
from course_lib.launch import RanksHung, launch

NAMES = ("shift", "logged", "loaded", "trained", "guarded")
PATIENCE = 1.5  # seconds until `show` calls it a hang
HINTS = {
    "what is started outside a batch may run one after the other with NCCL: batch_isend_irecv": lambda f: (
        f["clause"] == "hang" and f["in turn"]
    ),
    "the rank that is not where the others wait is the one to read": lambda f: f["clause"] == "hang",
    "a rank without a batch must still take part, with nothing to add": lambda f: f["name"] == "trained",
    "all ranks must come to the same decision, so they have to talk before it": lambda f: f["name"] == "guarded",
    "only rank 0 needs it, and all must help to make it": lambda f: f["name"] == "logged",
}


def inputs(name: str, seed: int, rank: int, ranks: int) -> tuple[Any, ...]:
    """What a rank's call gets; the same for each call with this seed."""
    if name == "trained":
        counts = [3 + (seed + r) % 3 for r in range(ranks)]  # neighbours differ
        return ([values(5, seed + i, rank) for i in range(counts[rank])],)
    if name == "guarded":
        bad = seed % 2 == 0 and rank == seed % ranks
        return torch.tensor(float("nan") if bad else 1.25 + rank), values(64, seed, rank)
    if name == "loaded":
        return values(64, seed, rank), torch.tensor([3.0 + rank])
    return (values(64 if name == "shift" else 1, seed, rank),)


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
        return torch.stack([sum(b[i].sum() for (b,) in given if i < len(b)) for i in range(steps)])
    if not all(loss.isfinite() for loss, _ in given):
        return None
    return sum(gradient for _, gradient in given) / ranks


@contextmanager
def in_turn() -> Iterator[None]:
    """Outside a batch, let each isend and irecv run to its end before it returns."""
    batching: list[bool] = []
    batch = distributed_c10d.batch_isend_irecv

    def alone(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            work = start(*args, **kwargs)
            if batching or work is None:
                return work
            work.wait()
            return Mock(is_completed=lambda: True)  # gloo's own would wait for a second message

        return started

    def together(operations: list[Any]) -> list[Any]:
        batching.append(True)
        try:
            return batch(operations)
        finally:
            batching.clear()

    changed = {"isend": alone(dist.isend), "irecv": alone(dist.irecv), "batch_isend_irecv": together}
    with patch.multiple(dist, **changed), patch.multiple(distributed_c10d, **changed):
        yield


def on_a_rank(programs: type, name: str, seed: int, nccl: bool = False) -> Any:
    with in_turn() if nccl else nullcontext():
        result = getattr(programs(), name)(*inputs(name, seed, dist.get_rank(), dist.get_world_size()))
    dist.barrier()  # a rank that goes on while others wait has not finished
    return result


def show(programs: type) -> None:
    """Run each of the five on three ranks until it hangs, and print what `launch` reports."""
    for name in NAMES:
        try:
            launch(on_a_rank, programs, name, 4, ranks=3, timeout=PATIENCE, backend="gloo", threads=1, quiet=True)
            print(f"{name}: no hang this time\n")
        except RanksHung as error:
            print(f"{name}: {in_your_words(error)}\n")


@lab.exercise("Five programs that hang", importance=5, difficulty=3, minutes=25)
def repaired(parts: Callable[[], Any]) -> str:
    """Each returns what it owes on 3 and 4 ranks; `shift` also where messages outside a batch run one by one."""
    programs, seed = parts(), fresh_seed()
    if not inspect.isclass(programs) or any(not callable(getattr(programs, name, None)) for name in NAMES):
        raise NotYet(f"return the class itself, a subclass of Programs with {', '.join(NAMES)}")
    with named_seed(seed):
        for name in NAMES:
            for ranks, extra, nccl in ((3, 0, False), (4, 1, False), (3, 2, True)):
                if not nccl or name == "shift":
                    _right(programs, name, seed + extra, ranks, nccl)
    return "five programs on 3 and 4 ranks; shift also where messages outside a batch run one after the other"


def _right(programs: type, name: str, seed: int, ranks: int, nccl: bool) -> None:
    contract = Contract(HINTS, {"name": name, "in turn": nccl}, f"{name} on {ranks} ranks")
    try:
        results = run(on_a_rank, programs, name, seed, nccl, ranks=ranks)
    except Hung as error:
        raise contract.broken(str(error), "hang") from None
    for rank, result in enumerate(results):
        expected = owed(name, seed, rank, ranks)
        what = f"what rank {rank} returns"
        if expected is None:
            contract.holds(result is None, f"{what} should be None, and is {str(result)[:60]}")
            continue
        if name == "trained" and isinstance(result, (list, tuple)):
            result = torch.stack([torch.as_tensor(total).sum() for total in result])
        if name == "loaded" and isinstance(result, (list, tuple)):
            result = dict(zip(expected, result, strict=False))
        contract.values(what, result, expected, rtol=1e-6)
