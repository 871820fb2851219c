"""What a run needs beside its weights to go on as if nothing had happened: random numbers, and the scheduler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from course_lib.checkpoints import pickles
from course_lib.checkpoints.errors import CheckpointError

SCHEDULER = "scheduler.pt"


def random_file(rank: int) -> str:
    return f"random-{rank:05d}.pt"


def random_numbers() -> dict[str, Any]:
    """Where this rank's generators stand: PyTorch's on the CPU and on its GPU, Python's, NumPy's."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": (torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
    }


def set_random_numbers(state: dict[str, Any]) -> None:
    """Put this rank's generators where ``random_numbers`` found them. Raises CheckpointError for anything else."""
    try:
        torch.set_rng_state(state["torch"].clone())
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].clone())
        random.setstate(state["python"])
        keys, *rest = state["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"The state of the random numbers does not fit: {error}.") from error


def write(path: Path, rank: int, scheduler: Any) -> None:
    """This rank's random numbers, and from rank 0 the scheduler."""
    save_and_look(random_numbers(), path / random_file(rank))
    if scheduler is not None and rank == 0:
        save_and_look(scheduler.state_dict(), path / SCHEDULER)


def save_and_look(thing: Any, path: Path, names: tuple[str, ...] = ()) -> None:
    """``torch.save``, and a look at once whether the file can be read back without trusting it.

    Raises OSError for a full disk, and CheckpointError where the state holds objects that no safe reader takes: better
    now than when it is needed.
    """
    with path.open("wb") as file:  # by Python's own file, whose errors say what the system said
        torch.save(thing, file)
    try:
        pickles.torch_file(path, names)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path.name} holds an object that cannot be read back without running its code: save plain numbers, "
            f"strings, lists and tensors. ({error})"
        ) from error


def read(path: Path, rank: int, *, same_ranks: bool, scheduler: Any) -> None:
    """The scheduler's state, and the random numbers where there are as many ranks as were saved.

    With another number of ranks each keeps its own random numbers: dropout then differs in any case.
    """
    if scheduler is not None:
        if not (path / SCHEDULER).exists():
            raise CheckpointError(f"{path} holds no scheduler's state: it was saved without one.")
        scheduler.load_state_dict(pickles.torch_file(path / SCHEDULER))
    if same_ranks:
        set_random_numbers(pickles.torch_file(path / random_file(rank)))
