"""CheckpointError, and how all ranks raise the same one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved or loaded; the message says why."""


def system_error(error: BaseException | None) -> OSError | None:
    """Find the OSError behind another error: torch's writer of zip files hides a full disk behind its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def reason(error: BaseException) -> str:
    """Say in one line what went wrong: what the system said, such as "No space left on device", or the error's text."""
    cause = system_error(error)
    if cause is not None and cause.strerror:
        return cause.strerror
    return " ".join(str(error).split()) or type(error).__name__


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: T) -> list[T]:
    """Return every rank's value, by rank, on every rank."""
    world_size = rank_and_world_size()[1]
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def share(value: T) -> T:
    """Return rank 0's value on every rank."""
    values = [value]
    if rank_and_world_size()[1] > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def together(failed: str) -> Iterator[None]:
    """If the block fails on any rank, raise the same CheckpointError on all: ``{failed}: rank 1: No space left on device.``

    Every rank must reach the end of the block: nothing in it may wait for a rank that has failed.
    """
    caught: BaseException | None = None
    rank = rank_and_world_size()[0]
    try:
        yield
    except CheckpointException as error:  # DCP's own, and no Exception: what failed on which rank, the same on all
        rank = min(error.failures)
        caught = error.failures[rank][0]
    except Exception as error:  # raised below, on all ranks: one that left alone would leave the others waiting
        caught = error
    message = None
    if caught is not None:
        message = str(caught) if isinstance(caught, CheckpointError) else f"{failed}: rank {rank}: {reason(caught)}."
    messages = [text for text in gather(message) if text is not None]
    if messages:
        raise CheckpointError(messages[0]) from caught
