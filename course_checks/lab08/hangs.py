"""Lab 8, exercise 4: a trainer on two axes that hangs. It stands in the notebook; here is what it gets, and what it owes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from course_checks.harness import Contract, NotYet, fresh, fresh_seed, healthy_untouched, named_seed, without_limit
from course_checks.lab08.common import lab
from course_lib.launch import RankFailed, RanksHung, launch
from course_lib.launch.rank import PEER_LOST

GRIDS = ((2, 2), (3, 2), (2, 3), (1, 4))  # dp, tp
BROKEN, HEALTHY = ("average", "norm_of", "usable", "finished"), ("__init__", "update", "train")
LAST, SKIPPED = 6, (1, 3)  # steps that are taken at most, and those with a gradient that is not finite
RATE, PATIENCE = 0.5, 1.5  # of plain SGD; seconds until `show` calls it a hang
STEPS, NORM, WEIGHTS, HANG = "steps", "a step's norm", "the weight", "hang"
HINTS = {
    "along each axis all ranks make the same calls in one order, and decide by a number that all of them have": lambda f: (
        f["clause"] == HANG
    ),
    "norm's gradient is the same on all tp ranks, and was counted by each": lambda f: (
        f["clause"] == NORM and f["close"]("counted")
    ),
    "a replica's norm has the parts of all tp ranks": lambda f: f["clause"] == NORM and f["close"]("own"),
    "replicas are averaged; norm's partial sums are added up along tp first": lambda f: f["clause"] == WEIGHTS,
    "all replicas count: their mean loss decides, and a gradient that is not finite on any rank": lambda f: (
        f["clause"] == STEPS
    ),
}


class Step(NamedTuple):
    """What backward leaves on a rank."""

    loss: torch.Tensor  # of this replica: the same on its tp ranks
    matrix: torch.Tensor  # gradient of this rank's columns
    norm: torch.Tensor  # partial sum of the gradient, over this rank's tokens


def steps(seed: int, replica: int, place: int, dp: int, tp: int) -> list[Step]:
    """Fresh steps of the rank at (replica, place) of the grid. In each of SKIPPED one rank's gradient is not finite."""
    made = []
    for i in range(LAST):
        loss = (LAST - i) * (0.4, 0.9, 0.45)[replica] + fresh((1,), seed, 50 + 7 * i + replica) / 50
        matrix, norm = (
            fresh((size,), seed, 100 + 40 * i + 8 * replica + 2 * place + n) for n, size in enumerate((6, 3))
        )
        if i in SKIPPED and (replica, place) == ((seed + i // 2) % dp, (seed // 2 + i // 2) % tp):
            (matrix, norm)[i // 2][1] = (torch.inf, torch.nan)[i // 2]
        made.append(Step(loss, matrix, norm))
    return made


def goal(seed: int, dp: int) -> float:
    """A loss that the mean reaches in the last step but one, some replicas before and some after it."""
    means = [sum(steps(seed, r, 0, dp, 1)[i].loss.item() for r in range(dp)) / dp for i in (LAST - 3, LAST - 2)]
    return sum(means) / 2


def owed(seed: int, dp: int, tp: int, place: int) -> dict[str, Any]:
    """Norms of the steps that were taken, weights, and norms as some mistakes have them."""
    every = [[steps(seed, r, t, dp, tp) for t in range(tp)] for r in range(dp)]
    result: dict[str, Any] = {NORM: [], "counted": [], "own": [], "matrix": torch.zeros(6), "norm": torch.zeros(3)}
    for i in range(LAST - 1):
        matrices = [sum(every[r][t][i].matrix for r in range(dp)) / dp for t in range(tp)]
        norm = sum(every[r][t][i].norm for r in range(dp) for t in range(tp)) / dp
        if i not in SKIPPED:
            squares = [float(matrix.square().sum()) for matrix in matrices]
            whole = float(norm.square().sum())
            result[NORM].append((sum(squares) + whole) ** 0.5)
            result["counted"].append((sum(squares) + tp * whole) ** 0.5)
            result["own"].append((squares[place] + whole) ** 0.5)
            result["matrix"] -= RATE * matrices[place]
            result["norm"] -= RATE * norm
    return result


def on_a_rank(trainer: type, dp: int, tp: int, seed: int) -> tuple[Any, ...]:
    replica, place = divmod(dist.get_rank(), tp)
    made = trainer(dp, tp)
    norms = made.train(steps(seed, replica, place, dp, tp), goal(seed, dp), RATE)
    return list(norms), made.matrix, made.norm


def run(trainer: type, dp: int, tp: int, seed: int, patience: float) -> list[Any] | str:
    """What each rank returns; or `launch`'s report, where they wait for each other or their calls do not match."""
    try:
        with without_limit():
            how = {"ranks": dp * tp, "timeout": patience, "backend": "gloo", "threads": 1, "quiet": True}
            return launch(on_a_rank, trainer, dp, tp, seed, **how).results
    except RanksHung as hung:
        return str(hung).rstrip(".")
    except RankFailed as failed:
        apart = failed.cause_type == "SIGABRT" or any(sign in failed.cause_message.lower() for sign in PEER_LOST)
        if not apart:  # the program's own exception
            raise
        return str(failed).partition("\n\n")[0].rstrip(".")


def show(trainer: type, dp: int = 2, tp: int = 2) -> None:
    """Run it on dp x tp ranks; print what `launch` reports, or the norms that rank 0 has logged."""
    seen = run(trainer, dp, tp, 11, PATIENCE)
    print(
        seen
        if isinstance(seen, str)
        else f"no hang; norms of the steps taken: {', '.join(f'{float(n):.4f}' for n in seen[0][0])}"
    )


@lab.exercise("A hang across two axes", importance=5, difficulty=4, minutes=15)
def mended(parts: Callable[[], Any]) -> str:
    """Steps, norms and weights as they should be on four grids, with nothing replaced that works."""
    trainer, seed = parts(), fresh_seed()
    base = next((c for c in getattr(trainer, "__mro__", ())[1:] if set(BROKEN) <= set(vars(c))), None)
    if base is None:
        raise NotYet("return the class itself, a subclass of Trainer")
    healthy_untouched(trainer, base, HEALTHY)
    with named_seed(seed):
        for dp, tp in GRIDS:
            _right(trainer, dp, tp, seed)
    grids = ", ".join(f"{dp} x {tp}" for dp, tp in GRIDS)
    return f"on {grids} ranks {LAST - 1 - len(SKIPPED)} steps taken and {len(SKIPPED)} skipped, with the norms and weights of one rank"


def _right(trainer: type, dp: int, tp: int, seed: int) -> None:
    contract = Contract(HINTS, about=f"dp {dp} x tp {tp}")
    results = run(trainer, dp, tp, seed, 4.0)
    contract.holds(not isinstance(results, str), str(results), HANG)
    for rank, (norms, matrix, norm) in enumerate(results):
        expected = owed(seed, dp, tp, rank % tp)
        told = f"rank {rank} took {len(norms)} steps, and should have taken {len(expected[NORM])}"
        contract.holds(len(norms) == len(expected[NORM]), told, STEPS)
        norms = [float(each) for each in norms]
        contract.facts["close"] = lambda name, norms=norms, expected=expected: torch.allclose(
            torch.tensor(norms), torch.tensor(expected[name]), 1e-4
        )
        for name, yours in (("matrix", matrix), ("norm", norm)):
            contract.values(WEIGHTS, yours, expected[name], rtol=1e-4, atol=1e-5)
        contract.values(NORM, norms, expected[NORM], rtol=1e-4)
