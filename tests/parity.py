"""What the tests of every parallel training program share: one rank's losses by a plain loop, and runs to compare.

fp32 rounds to 6e-8 of a value, and ranks add up in another order than one rank does: losses differ by up to 1e-6 after 20
steps. A mistake shows far above `TOLERANCE`: gradients that are summed where they should be averaged move a loss by 1e-2
or more. Adam hardly sees a factor in all gradients; plain SGD with a large learning rate does, so tests use both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle
import refusals
import torch

from course_lib.launch import launch
from course_lib.launch.threads import one_thread
from course_lib.models.data import sample_batch

for module in (sys.modules[__name__], refusals):  # ranks need not find the tests
    cloudpickle.register_pickle_by_value(module)

TOLERANCE = 1e-5


def sgd(parameters: Any, lr: float, **_: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr)  # a fused one takes no DTensor


OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": sgd}


def one_rank(
    model: torch.nn.Module,
    *,
    steps: int,
    global_batch: int,
    seq_len: int,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    max_grad_norm: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms (none without `max_grad_norm`) of one process that trains on the whole batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    update = OPTIMIZERS[optimizer](trained, lr=lr)
    losses, norms = [], []
    with one_thread():
        for step in range(steps):
            batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            if max_grad_norm:
                norms.append(torch.nn.utils.clip_grad_norm_(trained, max_grad_norm).item())
            update.step()
            update.zero_grad()
            losses.append(loss.item())
    return losses, norms


def off_by(actual: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(actual, expected, strict=True))


def assert_same_training(outcomes: list[Any], losses: list[float], name: str, tolerance: float = TOLERANCE) -> None:
    """The outcome of each rank against the first of one rank's losses."""
    for rank, outcome in enumerate(outcomes):
        assert (outcome.rank, outcome.world_size) == (rank, len(outcomes)), name
        assert off_by(outcome.losses, losses[: len(outcome.losses)]) < tolerance, (name, rank)


def by(train: Callable[..., Any], *, optimizer: str = "adamw", **how: Any) -> Any:
    """A program's outcome, with `optimizer` of `OPTIMIZERS` in the place of its AdamW."""
    adamw, torch.optim.AdamW = torch.optim.AdamW, OPTIMIZERS[optimizer]
    try:
        return train(**how)
    finally:
        torch.optim.AdamW = adamw


def train_each(train: Callable[..., Any], settings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """On a rank: the outcome of each setting, one after another."""
    torch.set_num_threads(1)  # a small batch gains nothing from two, and loses much on a busy machine
    return {name: by(train, **how) for name, how in settings.items()}


class Runs(dict):
    """Launches of `train` by number of ranks, each started when it is first asked for.

    `settings[ranks][name]` are arguments, which override `sizes`.
    """

    def __init__(self, train: Callable[..., Any], settings: Mapping[int, Mapping[str, dict]], sizes: dict) -> None:
        self.train, self.sizes = train, sizes
        self.settings = {
            ranks: {name: {**sizes, **how} for name, how in by_name.items()} for ranks, by_name in settings.items()
        }

    def __missing__(self, ranks: int) -> Any:
        self[ranks] = launch(train_each, self.train, self.settings[ranks], ranks=ranks, quiet=True, timeout=280)
        return self[ranks]

    def outcomes(self, ranks: int, name: str) -> list[Any]:
        """By rank."""
        return [results[name] for results in self[ranks].results]

    def every(self) -> Iterator[tuple[int, str, dict[str, Any], list[Any]]]:
        """(ranks, name, arguments, outcomes by rank) of each setting."""
        for ranks, by_name in self.settings.items():
            for name, how in by_name.items():
                yield ranks, name, how, self.outcomes(ranks, name)

    def last_step(self, ranks: int, name: str, rank: int) -> list[Any]:
        """A rank's collectives in the last step of a setting. Every step ends with a report of 4 bytes to all."""
        calls = [c for c in self[ranks].collectives if c.rank == rank]
        reports = [i for i, c in enumerate(calls) if (c.kind, c.bytes, len(c.group)) == ("all_reduce", 4, ranks)]
        names = list(self.settings[ranks])
        end = sum(self.settings[ranks][before]["steps"] for before in names[: names.index(name) + 1])
        return calls[reports[end - 2] + 1 : reports[end - 1]]
