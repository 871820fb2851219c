"""Check the arguments of a resumable run, alone and against its checkpoint."""

from __future__ import annotations

import math
from typing import Any

from course_lib.training.resumable.faults import FORGET
from course_lib.training.resumable.spikes import Verdict

ON_SPIKE = ("none", "skip", "rollback")
PATIENCE = 3  # bad batches one after another; a fourth one is not the data's fault


def check(world_size: int, **given: Any) -> None:
    """Raise ValueError for an option of ``resumable.train`` that cannot be; every rank finds the same."""
    for name in ("steps", "global_batch", "seq_len", "virtual_ranks", "save_every", "keep"):
        if given[name] < 1:
            raise ValueError(f"{name}={given[name]}: give a whole number of at least 1.")
    for name in ("warmup", "stop_at", "max_grad_norm"):
        if not 0 <= given[name] < math.inf:
            raise ValueError(f"{name}={given[name]}: give a number of at least 0.")
    if not 0 < given["lr"] < math.inf:
        raise ValueError(f"lr={given['lr']}: give a learning rate above 0.")
    if not 0 <= given["dropout"] < 1:
        raise ValueError(f"dropout={given['dropout']}: give a share from 0 to below 1.")
    virtual = given["virtual_ranks"]
    if virtual < world_size:
        raise ValueError(f"virtual_ranks={virtual} leaves {world_size} ranks without work: give at least {world_size}.")
    if given["global_batch"] % virtual:
        raise ValueError(f"global_batch={given['global_batch']} does not divide into {virtual} equal shards.")
    for name, choices in (("on_spike", ON_SPIKE), ("forget", FORGET)):
        if given[name] not in choices:
            raise ValueError(f"{name}={given[name]!r}: choose one of {', '.join(map(repr, choices))}.")
    if given["on_spike"] == "rollback" and not given["checkpoint_dir"]:
        raise ValueError("on_spike='rollback' goes back to a checkpoint: give a folder as checkpoint_dir.")


def check_same(data: dict[str, Any], asked: dict[str, Any], before: dict[str, Any], *, tell: bool) -> None:
    """What orders the data must be as it was; what else was changed on purpose is told, not refused."""
    for name, value in data.items():
        if before[name] != value:
            raise ValueError(f"{name}={value}: the checkpoint was trained with {before[name]}, another order of data.")
    for name, value in asked.items():
        if before[name] != value and tell:
            print(f"{name} is {value} from here on; the checkpoint was trained with {before[name]}.", flush=True)


def give_up_after(patience: int, in_a_row: int, verdict: Verdict) -> None:
    """Raise RuntimeError where so many spikes without progress say that it is not one bad batch."""
    if in_a_row > patience:
        raise RuntimeError(
            f"{in_a_row} spikes without progress between them, the last at {verdict.reason} It is not one batch: lower "
            "the learning rate, or go on from an earlier checkpoint."
        )
