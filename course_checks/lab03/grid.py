"""Lab 3, exercise 5: the process groups of a grid of ranks, made on every rank in the same order."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course_checks.harness import NotYet
from course_checks.lab03.common import lab, run

GRIDS = {6: [(2, 3), (3, 2)], 4: [(2, 2), (4, 1), (1, 4)], 1: [(1, 1)]}  # ranks -> (dp, tp)
PATIENCE = 2.5  # seconds that a rank waits for the others' call of new_group before it says who never made it


@lab.exercise("Rows and columns of a grid", importance=4, difficulty=2, minutes=20)
def grid_groups(groups: Callable[..., Any]) -> str:
    """Sums over rows and over columns come out, and no rank waits for another in new_group."""
    for ranks, grids in GRIDS.items():
        told = run(_on_ranks, groups, grids, ranks=ranks)
        for at, (dp, tp) in enumerate(grids):
            for rank in range(ranks):
                _right_groups(told[rank][at], rank, dp, tp)
    return "sums over rows and columns of 2x2, 4x1, 1x4, 2x3 and 3x2 ranks; every rank made every group in one order"


def _on_ranks(groups: Callable[..., Any], grids: list[tuple[int, int]]) -> list[Any]:
    told: list[Any] = []
    rank = dist.get_rank()
    for dp, tp in grids:
        with _same_calls(f"{dp}x{tp}"):
            made = groups(rank, dp, tp)
        dist.barrier()
        pair = isinstance(made, (tuple, list)) and len(made) == 2
        told.append([_members(group) for group in made] if pair else type(made).__name__)
        everybody = torch.tensor([int(told[-1] == _lines(rank, dp, tp))])
        dist.all_reduce(everybody)
        if everybody == dist.get_world_size():  # a sum over groups that do not fit together would hang
            told[-1] += [_sum_over(group, rank) for group in made]
        dist.barrier()
    return told


def _lines(rank: int, dp: int, tp: int) -> list[list[int]]:
    """The ranks of this rank's row and of its column."""
    grid = torch.arange(dp * tp).view(dp, tp)
    return [grid[rank // tp].tolist(), grid[:, rank % tp].tolist()]


def _members(group: Any) -> list[int] | str:
    if not isinstance(group, dist.ProcessGroup):
        outside = group is dist.GroupMember.NON_GROUP_MEMBER
        return "not a member" if outside else type(group).__name__
    return dist.get_process_group_ranks(group)


def _sum_over(group: dist.ProcessGroup, rank: int) -> int:
    digits = torch.tensor([10**rank])
    dist.all_reduce(digits, group=group)
    return int(digits)


@contextmanager
def _same_calls(grid: str) -> Any:
    """Compare each call of new_group with the other ranks' before it is made: what differs is told and does not hang."""
    real, store, number = dist.new_group, distributed_c10d._get_default_store(), 0
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def compared(members: Any = None, *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        members = kwargs.pop("ranks", members)
        members = None if members is None else [int(each) for each in members]
        if not kwargs.get("use_local_synchronization"):  # with it only the members call
            number += 1
            key = f"lab03/{grid}/{number}"
            store.set(f"{key}/{rank}", json.dumps(members))
            for other in range(ranks):
                _compare(store, f"{key}/{other}", number, (rank, members), other)
        return real(members, *args, **kwargs)

    dist.new_group = distributed_c10d.new_group = compared
    try:
        yield
    finally:
        dist.new_group = distributed_c10d.new_group = real


def _compare(store: Any, key: str, number: int, mine: tuple[int, Any], other: int) -> None:
    try:
        store.wait([key], timedelta(seconds=PATIENCE))
    except Exception as error:  # the stores of torch raise different classes when the time is up
        raise NotYet(
            f"rank {mine[0]} makes its new_group number {number}, for ranks {mine[1]}, and rank {other} never does: "
            "new_group waits for ALL ranks, also for those that are not in the group"
        ) from error
    theirs = json.loads(store.get(key))
    if theirs != mine[1]:
        raise NotYet(
            f"new_group number {number} is for ranks {mine[1]} on rank {mine[0]} and for ranks {theirs} on rank {other}: "
            "every rank must make every group, in the same order, also those that it is not in"
        )


def _right_groups(told: Any, rank: int, dp: int, tp: int) -> None:
    where = f"on a {dp}x{tp} grid"
    if isinstance(told, str):
        raise NotYet(f"{where} grid_groups should return (row, column), two process groups, and returned {told}")
    row, column = _lines(rank, dp, tp)
    other = torch.arange(dp * tp).view(tp, dp)
    other_row, other_column = other[rank // dp].tolist(), other[:, rank % dp].tolist()
    mine = told[:2]
    for name, members in zip(("row", "column"), mine, strict=True):
        if members == "not a member" or (isinstance(members, list) and rank not in members):
            raise NotYet(
                f"{where} the {name} that rank {rank} gets is a group that it is not in: of all the groups that it makes, "
                "a rank keeps the two that hold it"
            )
        if isinstance(members, str):
            raise NotYet(f"{where} the {name} should be a process group of dist.new_group, and is of type {members}")
    if mine == [row, column]:
        if len(told) == 2:  # another rank's are not right, and the loop over the ranks comes to it
            return
        digits = [sum(10**each for each in members) for members in (row, column)]
        assert told[2:] == digits, f"the groups are {mine} and sum up {told[2:]}"
        return
    if mine == [column, row]:
        raise NotYet(f"{where} row and column are swapped: rank {rank}'s row is {row}, its column {column}")
    if mine in ([other_row, other_column], [other_column, other_row]):
        raise NotYet(
            f"{where} you count as view(tp, dp) does: with view(dp, tp) rank {rank}'s row is {row}, its column {column}"
        )
    name, got, wanted = ("row", mine[0], row) if mine[0] != row else ("column", mine[1], column)
    raise NotYet(f"{where} rank {rank}'s {name} should be ranks {wanted}, and is {got}")
