"""Lab 8, exercise 4: from a rank to its place in the grid, and from the grid to its groups."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from itertools import permutations
from typing import Any, NamedTuple

from course_checks.harness import NotYet, returned, run_ranks
from course_checks.lab08.common import RANKS, lab
from course_lib.parallel.grid import Grid

AXES = ("pp", "dp", "tp")  # slowest first
Place = tuple[int, int, int]


class Shape(NamedTuple):
    """A grid, and how many ranks a machine holds."""

    pp: int
    dp: int
    tp: int
    per_node: int = 8

    def __str__(self) -> str:
        return f"pp={self.pp}, dp={self.dp}, tp={self.tp}"

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp


SHAPES = (
    Shape(3, 2, 4),
    Shape(2, 3, 2),
    Shape(4, 1, 2, 4),
    Shape(1, 5, 3, 5),
    Shape(5, 4, 1, 4),
    Shape(2, 4, 4, 8),
    Shape(8, 16, 8, 8),
)


@lab.exercise("The rank grid", importance=4, difficulty=2, minutes=20)
def rank_grid(coordinates: Callable[..., Any], groups: Callable[..., Any], machines: Callable[..., Any]) -> str:
    """Places and groups of every rank of seven uneven grids, and those that init_device_mesh makes on four ranks."""
    small = [shape for shape in SHAPES if shape.size <= 48]
    places = {s: [_place(coordinates(r, s.pp, s.dp, s.tp), r, s) for r in range(s.size)] for s in small}
    _right_places(places)
    for shape in small:
        for axis in AXES:
            _right_groups(groups(axis, shape.pp, shape.dp, shape.tp), axis, shape)
    for shape in SHAPES:
        for axis in AXES:
            _right_machines(machines(axis, *shape), axis, shape)
    for shape, told in _on_four_ranks():
        for rank, (place, members) in enumerate(told):
            mine = _place(coordinates(rank, *shape[:3]), rank, shape)
            own = [[list(g) for g in groups(axis, *shape[:3]) if rank in g][0] for axis in AXES]
            if mine != place or own != members:
                raise NotYet(
                    f"init_device_mesh of {shape} gives rank {rank} the place {place} and the groups {members}"
                )
    big = SHAPES[-1]
    return (
        f"{len(SHAPES)} grids, and what init_device_mesh makes on 4 real ranks. On {big.size:,} GPUs, {big}, a tensor-parallel "
        f"group touches {true_machines('tp', big)} machine, a pipeline {true_machines('pp', big)}, a data-parallel group "
        f"{true_machines('dp', big)}"
    )


def true_machines(axis: str, shape: Shape) -> int:
    """The most machines that one group along the axis touches."""
    return _grid(shape).nodes(axis, shape.per_node)


def _grid(shape: Shape) -> Grid:
    return Grid(pp=shape.pp, dp=shape.dp, tp=shape.tp)


def place_of(rank: int, shape: Shape, order: tuple[str, ...] = AXES) -> Place:
    """(pp, dp, tp) of a rank if `order` is the order of the axes, slowest first."""
    at = {}
    for axis in reversed(order):
        rank, at[axis] = divmod(rank, getattr(shape, axis))
    return at["pp"], at["dp"], at["tp"]


def _place(value: Any, rank: int, shape: Shape) -> Place:
    value = returned(value, (tuple, list), f"the coordinates of rank {rank}")
    if len(value) != 3 or not all(hasattr(n, "__index__") for n in value):
        raise NotYet(f"{shape}: give rank {rank} three whole numbers (pp, dp, tp), not {tuple(value)}")
    return tuple(operator.index(n) for n in value)


def _right_places(places: dict[Shape, list[Place]]) -> None:
    right = {s: [place_of(r, s) for r in range(s.size)] for s in places}
    if places == right:
        return
    for turned in permutations(range(3)):
        for order in permutations(AXES):
            if all(
                [tuple(place_of(r, s, order)[i] for i in turned) for r in range(s.size)] == mine
                for s, mine in places.items()
            ):
                _name_the_order(order, turned)
    shape = next(s for s in places if places[s] != right[s])
    rank = next(r for r in range(shape.size) if places[shape][r] != right[shape][r])
    mine, wanted = places[shape][rank], right[shape][rank]
    outside = [a for a, n in zip(AXES, mine, strict=True) if not 0 <= n < getattr(shape, a)]
    if outside:
        why = f"{outside[0]} goes from 0 to {getattr(shape, outside[0]) - 1}: take the remainder by the width of the axis itself"
    elif len(set(places[shape])) < shape.size:
        double = next(p for p in places[shape] if places[shape].count(p) > 1)
        ranks = [r for r, p in enumerate(places[shape]) if p == double]
        why = f"ranks {ranks[0]} and {ranks[1]} both are at {double}, and each place is for one rank"
    else:
        why = "tp counts up first, then dp, then pp; each digit is divided by the widths below it, and they are not all equal"
    raise NotYet(f"{shape}: rank {rank} is at (pp, dp, tp) = {wanted}, and you give {mine}: {why}")


def _name_the_order(order: tuple[str, ...], turned: tuple[int, ...]) -> None:
    if order == AXES:
        raise NotYet(
            f"the right coordinates in the order ({', '.join(AXES[i] for i in turned)}): return them as (pp, dp, tp)"
        )
    if order[-1] != "tp":
        raise NotYet(
            f"your {order[-1]} counts up first, so that neighbours in rank, which share a machine, lie along {order[-1]}. tp "
            "sends the most by far, several times in each layer: its groups are the neighbours, so tp counts up first"
        )
    raise NotYet(
        "dp and pp are exchanged: tp counts up first, then dp, then pp. The stages of a pipeline send the least, so they "
        "lie furthest apart"
    )


def _right_groups(value: Any, axis: str, shape: Shape) -> None:
    where = f"the groups along {axis} of {shape}"
    value = returned(value, (list, tuple), where)
    lists = all(isinstance(group, (list, tuple, range)) for group in value)
    if not lists or not all(isinstance(rank, int) for group in value for rank in group):
        raise NotYet(f"{where}: give a list of groups, each a list of ranks")
    mine = sorted(list(group) for group in value)
    wanted = _grid(shape).groups(axis)
    if mine == wanted:
        return
    known = {
        f"lie along {other}: ranks of a group differ in {axis} and in nothing else": sorted(_grid(shape).groups(other))
        for other in AXES
        if other != axis
    }
    known[
        f"hold the ranks that have {axis} in common; what is meant are those that differ in {axis} and in nothing else"
    ] = sorted(
        [r for r in range(shape.size) if place_of(r, shape)[AXES.index(axis)] == n] for n in range(getattr(shape, axis))
    )
    for words, groups in known.items():
        if mine == groups:
            raise NotYet(f"{where} {words}")
    if sorted(map(sorted, mine)) == wanted:
        raise NotYet(f"{where} have the right ranks in another order: in a group {axis} counts up from 0")
    every = [rank for group in mine for rank in group]
    if sorted(every) != list(range(shape.size)):
        lost = sorted(set(range(shape.size)) - set(every))
        raise NotYet(
            f"{where}: rank {lost[0]} is in none of them: there are {len(wanted)} groups, one for each place of the other axes"
            if lost
            else f"{where}: some rank is in two of them, and each rank belongs to one"
        )
    first = next(group for group in wanted if group not in mine)
    raise NotYet(f"{where}: {first} is one of them, and you do not have it; you give {mine[:3]}…")


def _right_machines(value: Any, axis: str, shape: Shape) -> None:
    value, wanted = returned(value, int, "the number of machines"), true_machines(axis, shape)
    if value == wanted:
        return
    where = f"{shape}, {shape.per_node} ranks a machine: a group along {axis}"
    groups = _grid(shape).groups(axis)
    touched = [len({r // shape.per_node for r in group}) for group in groups]
    if value == touched[0] or value == min(touched):
        raise NotYet(
            f"{where} touches up to {wanted} machines, and you say {value}: that is true of {groups[touched.index(value)]}, and "
            f"{groups[touched.index(wanted)]} lies otherwise. The widest group counts"
        )
    if value == len(groups[0]):
        raise NotYet(f"{where} touches {wanted} machines, and you count its {value} ranks")
    if value == -(-len(groups[0]) // shape.per_node):
        raise NotYet(
            f"{where} touches {wanted} machines, and you say {value}: as many as its ranks would fill. But they are no neighbours: "
            f"{groups[0]}"
        )
    raise NotYet(f"{where} touches up to {wanted} machines, not {value}: rank r is in machine r // {shape.per_node}")


@functools.cache
def _on_four_ranks() -> list[tuple[Shape, list[tuple[Place, list[list[int]]]]]]:
    """(grid, for each rank its place and its groups along AXES) as init_device_mesh makes them."""
    shapes = [Shape(2, 1, 2), Shape(1, 2, 2), Shape(2, 2, 1)]
    run = run_ranks(_meshes, shapes, ranks=RANKS)
    return [(shape, [told[n] for told in run.results]) for n, shape in enumerate(shapes)]


def _meshes(shapes: list[Shape]) -> list[tuple[Place, list[list[int]]]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    told = []
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape[:3], mesh_dim_names=AXES)
        members = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in AXES]
        told.append((tuple(mesh.get_coordinate()), members))
    return told
