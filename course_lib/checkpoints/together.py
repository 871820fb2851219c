"""What one rank finds, all ranks know: a save or a load fails on every rank with the same sentence, or on none.

Works without a process group too: then this process is rank 0 of 1. Values travel by pickle between the ranks of one
job, which trust each other; nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from course_lib.checkpoints.errors import CheckpointError, reason

T = TypeVar("T")


def place(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """(rank, world size); (0, 1) where no process group is up."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    world_size = place(group)[1]
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value, group=group)
    return values


def share(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's value on every rank."""
    if place(group)[1] == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


@contextmanager
def together(doing: str, folder: Path, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """All ranks come out of the block whole, or all raise the same CheckpointError: ``doing: rank 1: the disk is full``.

    Every rank must reach the end of the block: nothing in it may wait for a rank that has failed.
    """
    caught: BaseException | None = None
    rank = place(group)[0]
    try:
        yield
    except (Exception, CheckpointException) as error:  # a rank that left alone would leave the others waiting
        rank, caught = _first_failure(error, rank)
    sentence = None
    if isinstance(caught, CheckpointError):
        sentence = (rank, True, str(caught))
    elif caught is not None:
        sentence = (rank, False, reason(caught, folder))
    failed = [told for told in gather(sentence, group) if told]
    if failed:
        rank, whole, text = min(failed, key=lambda told: not told[1])  # a sentence says more than an exception
        raise CheckpointError(text if whole else f"{doing}: rank {rank}: {text}.") from caught


def _first_failure(error: BaseException, rank: int) -> tuple[int, BaseException]:
    """The first rank that failed, and its exception: DCP's own, which is no Exception, carries those of all ranks."""
    if isinstance(error, CheckpointException):
        rank = min(error.failures)
        return rank, error.failures[rank][0]
    return rank, error
