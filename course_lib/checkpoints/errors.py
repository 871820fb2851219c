"""CheckpointError, and how all ranks raise the same one."""

from __future__ import annotations

import errno
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved or loaded; the message says why, and what is still whole."""


def system_error(error: BaseException | None) -> OSError | None:
    """The OSError behind another error: torch's writer of zip files hides a full disk behind its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def reason(error: BaseException, folder: Path) -> str:
    """One line on what went wrong below ``folder``, with the free space of its disk."""
    cause = system_error(error)
    unsafe = re.search(r"GLOBAL (\S+\w)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk is full"
    elif cause is not None and cause.strerror:
        why = cause.strerror
    elif unsafe:
        return f"it names {unsafe[1]}, which no checkpoint of ours does"
    else:
        why = (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
    try:
        free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    except (OSError, StopIteration):
        return why
    return f"{why} ({free / 1e9:.2f} GB are free there)"


def rank_and_world_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """(0, 1) without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    world_size = rank_and_world_size(group)[1]
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value, group=group)
    return values


def share(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's value on every rank."""
    if rank_and_world_size(group)[1] == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


@contextmanager
def together(doing: str, folder: Path, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If any rank fails in the block, all raise the same CheckpointError: ``doing: rank 1: the disk is full``.

    Every rank must reach the end of the block: nothing in it may wait for a rank that has failed.
    """
    caught: BaseException | None = None
    rank = rank_and_world_size(group)[0]
    try:
        yield
    except CheckpointException as error:  # DCP's own, which is no Exception, carries the failures of all ranks
        rank = min(error.failures)
        caught = error.failures[rank][0]
    except Exception as error:  # raised below, on all ranks: one that left alone would leave the others waiting
        caught = error
    sentence = None
    if isinstance(caught, CheckpointError):
        sentence = (rank, True, str(caught))
    elif caught is not None:
        sentence = (rank, False, reason(caught, folder))
    failed = [one for one in gather(sentence, group) if one]
    if failed:
        rank, complete, text = min(failed, key=lambda one: not one[1])  # a CheckpointError says more than others
        raise CheckpointError(text if complete else f"{doing}: rank {rank}: {text}.") from caught
