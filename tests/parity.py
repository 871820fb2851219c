"""What the tests of every parallel training program share: one rank's losses by a plain loop, and runs to compare.

fp32 rounds to 6e-8 of a value, and ranks add up in another order than one rank does: losses differ by up to 1e-6 after 20
steps. A mistake shows far above `TOLERANCE`: gradients that are summed where they should be averaged move a loss by 1e-2
or more. Adam hardly sees a factor in all gradients; plain SGD with a large learning rate does, so tests use both.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch

from course_lib.launch import launch
from course_lib.launch.threads import one_thread
from course_lib.models.data import sample_batch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not find the tests

TOLERANCE = 1e-5
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


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


def refusals(calls: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """What each call raises, as "ValueError: ..."; "nothing" where it raises nothing."""
    messages = dict.fromkeys(calls, "nothing")
    for name, call in calls.items():
        try:
            call()
        except (ValueError, RuntimeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def train_each(train: Callable[..., Any], settings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """On a rank: the outcome of each setting, one after another."""
    torch.set_num_threads(1)  # a small batch gains nothing from two, and loses much on a busy machine
    return {name: train(**how) for name, how in settings.items()}


class Runs(dict):
    """Launches of `train` by number of ranks, each started when it is first asked for.

    ``runs[2].results[rank][name]`` is the outcome of ``settings[2][name]``, which override `sizes`.
    """

    def __init__(self, train: Callable[..., Any], settings: Mapping[int, Mapping[str, dict]], sizes: dict) -> None:
        self.train, self.settings, self.sizes = train, settings, sizes

    def __missing__(self, ranks: int) -> Any:
        settings = {name: {**self.sizes, **how} for name, how in self.settings[ranks].items()}
        self[ranks] = launch(train_each, self.train, settings, ranks=ranks, quiet=True, timeout=280)
        return self[ranks]


def last_step(run: Any, rank: int) -> Counter:
    """(kind, bytes, group) -> how often, in a rank's last step; every step ends with a report of 4 bytes to all."""
    calls = [c for c in run.collectives if c.rank == rank]
    everyone = len(run.results)
    ends = [i for i, c in enumerate(calls) if (c.kind, c.bytes, len(c.group)) == ("all_reduce", 4, everyone)]
    return Counter((c.kind, c.bytes, c.group) for c in calls[ends[-2] + 1 : ends[-1]])
