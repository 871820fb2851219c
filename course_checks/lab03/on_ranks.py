"""What lab 3's checks run on each rank: the learner's collective on a few tensors, with a record of its messages.

Values are quarters of whole numbers, so that a sum in fp32 is exact in whatever order it is made, and a sum in half
precision or in whole numbers is not. In each case one rank comes late:
who does not wait for a handle then reads what has not arrived, or overwrites what has not left.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_checks.harness import NotYet
from course_checks.lab03.wire import messages_sent
from course_lib.launch.failures import own_line, place
from course_lib.launch.rank import PEER_LOST

LATE = 0.03  # seconds
UNTOUCHED = -7777.0  # what an output holds before the learner's code has written to it


def values(seed: int, case: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What ``rank`` starts from: quarters below 750,000, others for each run, rank and case."""
    generator = torch.Generator().manual_seed(1_000_003 * case + 1009 * rank + seed)
    return torch.randint(1, 3_000_000, shape, generator=generator).to(dtype) / 4


def all_reduce(
    function: Callable[..., Any], shapes: list[tuple[tuple[int, ...], torch.dtype]], seed: int
) -> list[dict[str, Any]]:
    told, (rank, ranks) = [], (dist.get_rank(), dist.get_world_size())
    for case, (shape, dtype) in enumerate(shapes):
        tensor = values(seed, case, rank, shape, dtype)
        before = tensor.clone()
        uneven = tensor.numel() % ranks
        label = f"{tensor.numel()} elements on {ranks} ranks, so that the chunks differ in size" if uneven else ""
        outcome = _watched(case, function, (tensor,), tensor, label)
        expected = sum(values(seed, case, r, shape, dtype) for r in range(ranks))
        told.append(outcome | {"before": before, "expected": expected})
    return told


def reduce_scatter(
    function: Callable[..., Any], shapes: list[tuple[tuple[int, ...], torch.dtype]], seed: int
) -> list[dict[str, Any]]:
    told, (rank, ranks) = [], (dist.get_rank(), dist.get_world_size())
    for case, (shape, dtype) in enumerate(shapes):
        inputs = list(values(seed, case, rank, (ranks, *shape), dtype).unbind())
        before = [piece.clone() for piece in inputs]
        output = torch.full(shape, UNTOUCHED, dtype=dtype)
        outcome = _watched(case, function, (output, inputs), output)
        expected = list(sum(values(seed, case, r, (ranks, *shape), dtype) for r in range(ranks)).unbind())
        changed = any(not torch.equal(now, then) for now, then in zip(inputs, before, strict=True))
        told.append(outcome | {"before": before, "expected": expected, "changed": changed})
    return told


def all_gather(function: Callable[..., Any], sizes: list[list[int]], seed: int) -> list[dict[str, Any]]:
    """``sizes``: for each case the elements of each rank's shard."""
    told, rank = [], dist.get_rank()
    for case, shards in enumerate(sizes):
        expected = [values(seed, case, r, (size,)) for r, size in enumerate(shards)]
        outputs = [torch.full((size,), UNTOUCHED) for size in shards]
        theirs = list(outputs)  # the learner's list; what it must fill are the tensors in ours
        mine = expected[rank].clone()
        label = f"shards of {', '.join(map(str, shards))} elements" if len(set(shards)) > 1 else ""
        outcome = _watched(case, function, (theirs, mine), outputs, label)
        told.append(outcome | {"expected": expected})
    return told


def broadcast(function: Callable[..., Any], roots: list[int], elements: int, seed: int) -> list[dict[str, Any]]:
    told, rank = [], dist.get_rank()
    for case, root in enumerate(roots):
        tensor = values(seed, case, rank, (elements,))
        before = tensor.clone()
        outcome = _watched(case, function, (tensor, root), tensor)
        told.append(outcome | {"before": before, "expected": values(seed, case, root, (elements,))})
    return told


def _watched(
    case: int,
    function: Callable[..., Any],
    arguments: tuple,
    filled: torch.Tensor | list[torch.Tensor],
    label: str = "",
) -> dict[str, Any]:
    """Call the learner's code with all ranks at the start, and copy what it should fill the moment that it returns."""
    dist.barrier()
    if case % dist.get_world_size() == dist.get_rank():
        time.sleep(LATE)
    with messages_sent() as messages:
        try:
            value = function(*arguments)
        except (NotImplementedError, NotYet):
            raise
        except Exception as error:
            # A peer that is gone is news of the other rank's failure, not of this case
            if not label or any(sign in str(error).lower() for sign in PEER_LOST):
                raise
            raise NotYet(_raised(label, error)) from error
    got = [each.clone() for each in filled] if isinstance(filled, list) else filled.clone()
    dist.barrier()
    return {"got": got, "messages": messages, "value": value if isinstance(value, torch.Tensor) else None}


def _raised(label: str, error: Exception) -> str:
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    line = own_line(frames)
    return f"with {label}, your code raised {type(error).__name__}: {error}" + (f" at {place(*line)}" if line else "")
