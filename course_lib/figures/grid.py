"""Lesson 8's pictures of ranks: the grid in its machines with the groups of one axis, and ring attention step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.choices import AXES, AXIS_NAMES
from course_lib.figures.style import (
    GROUP_COLOURS,
    HATCHES,
    ON_WHITE,
    box,
    diagram,
    in_turn,
    new_figure,
    picture,
)
from course_lib.parallel.grid import Grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.figures.style import Picture

MOST_NODES, MOST_PER_NODE = 8, 16


def rank_grid(grid: Grid, *, axis: str = "tp", per_node: int = 8, title: str = "") -> Picture:
    """Ranks in their machines; those of one colour, hatch and letter form a group along `axis`.

    The first group is joined by lines: solid inside a machine, dashed where they leave it. Below stands what each axis
    uses. Of more than 8 machines the first 8 are drawn.
    """
    if not 1 <= per_node <= MOST_PER_NODE:
        raise ValueError(f"per_node={per_node}: choose from 1 to {MOST_PER_NODE} ranks per machine.")
    groups = grid.groups(axis)
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    nodes = -(-grid.size // per_node)
    shown = min(nodes, MOST_NODES)
    columns = 2 if per_node <= 4 and shown > 1 else 1
    rows = -(-shown // columns)
    reach = [_reach(grid, name, per_node) for name in AXES if getattr(grid, name) > 1] or ["one rank: nothing to send"]
    left_out = f" (the first {shown} of {nodes} machines)" if shown < nodes else ""
    ranks = f"{grid.size} ranks, {grid}" if grid.size > 1 else "A grid of one rank"
    figure, area = diagram(
        7.5, 1.25 + 0.86 * rows + 0.17 * len(reach), title or f"{ranks}: the groups along {axis}{left_out}"
    )
    wide = per_node + 1.2  # of a machine, in boxes
    place = {}
    for node in range(shown):
        left, bottom = node % columns * wide, -(node // columns) * 1.75
        box(area, left - 0.1, bottom - 0.14, per_node + 0.1, 1.2, "none", edgecolor="#555555", linewidth=0.9)
        area.text(left + per_node, bottom + 1.1, f"machine {node}", fontsize=8, ha="right", va="bottom")
        for i, rank in enumerate(range(node * per_node, min((node + 1) * per_node, grid.size))):
            x, group, smaller = left + i, group_of[rank], 2 if per_node > 8 else 0
            place[rank] = (x, bottom)
            box(area, x, bottom, 0.9, 0.9, GROUP_COLOURS[group % 7], hatch=in_turn(HATCHES, group), linewidth=0.9)
            middle = {"ha": "center", "va": "center", "bbox": ON_WHITE}
            area.text(x + 0.45, bottom + 0.63, f"{rank}", fontsize=9 - smaller, fontweight="bold", **middle)
            area.text(x + 0.45, bottom + 0.22, _letters(group), fontsize=8 - smaller, **middle)
    first = [rank for rank in groups[0] if rank in place]
    for a, b in zip(first, first[1:], strict=False):
        _join(area, place[a], place[b], outside=a // per_node != b // per_node)
    area.set(xlim=(-0.2, columns * wide - 0.9), ylim=(-(rows - 1) * 1.75 - 0.3, 1.6))
    figure.text(0.02, 0.01, "\n".join(reach), fontsize=8.5, va="bottom")
    below = 0.03 + 0.17 * len(reach) / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, below, 1, 1 - below))
    examples = "; ".join(
        f"{_letters(i)}: ranks {', '.join(map(str, group[:8]))}{', …' if len(group) > 8 else ''}"
        for i, group in enumerate(groups[:4])
    )
    count = f"{len(groups)} {AXIS_NAMES[axis]}-parallel group{'s' * (len(groups) > 1)} of {len(groups[0])}"
    return picture(
        figure,
        f"{ranks}, on {nodes} machine{'s' * (nodes > 1)} of {per_node}{left_out}, coloured by {count}: {examples}"
        f"{'; and so on' if len(groups) > 4 else ''}. {'. '.join(reach)}.",
    )


def _reach(grid: Grid, axis: str, per_node: int) -> str:
    width, nodes = getattr(grid, axis), grid.nodes(axis, per_node)
    where = "inside a machine" if nodes == 1 else f"across {nodes} machines"
    groups = grid.size // width
    return f"{axis} ({AXIS_NAMES[axis]}): {groups} group{'s' * (groups > 1)} of {width}, {where}"


def _letters(number: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA, as a spreadsheet counts."""
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _join(area: Axes, a: tuple[float, float], b: tuple[float, float], *, outside: bool) -> None:
    """From box to box: an arch over neighbours in a row, a straight line between rows."""
    same_row = a[1] == b[1]
    start, end = ((x + 0.45, y + 0.9) if same_row or b[1] > y or y < a[1] else (x + 0.45, y) for x, y in (a, b))
    look = {"arrowstyle": "-", "linewidth": 1.6, "linestyle": "--" if outside else "-", "shrinkA": 0, "shrinkB": 0}
    look["connectionstyle"] = f"arc3,rad={-0.25 if same_row else 0}"
    area.annotate("", end, start, zorder=6, arrowprops=look)


def ring_steps(ranks: int) -> Picture:
    """Whose keys and values are with which rank at each step of ring attention, and what is computed with them.

    A square is a rank's queries (from top to bottom) against the keys that are there (from left to right). White is the
    future, which no query may see; beside each row stands its work, in squares.

    """
    layouts = ("contiguous", "zigzag")
    width = min(8.2, 2.2 + 1.0 * ranks * len(layouts))
    figure, axes = new_figure(width, 0.85 + 0.62 * ranks, columns=len(layouts), grid="")
    summary = []
    for axis, layout in zip(axes, layouts, strict=True):
        work = ", ".join(f"rank {rank} {squares:g}" for rank, squares in enumerate(_steps(axis, ranks, layout)))
        summary.append(f"{layout}: {work} squares of work")
    return picture(
        figure,
        f"Ring attention on {ranks} ranks: a row per rank, a column per step. At step s rank r has the keys and values of "
        f"rank r - s. {'; '.join(summary)}.",
    )


def _steps(axis: Axes, ranks: int, layout: str) -> list[float]:
    """Draw one layout; returns the work of each rank, in squares."""
    from matplotlib.patches import Polygon

    from course_lib.training.sequence.ring_attention import meetings, runs  # it needs torch, and few pictures do

    pieces = len(runs(0, ranks, 2 * ranks, layout))  # in a rank's part of the sequence
    size = 0.78 / pieces
    axis.set_aspect("equal")
    axis.spines[["left", "bottom"]].set_visible(False)
    work = []
    for rank in range(ranks):
        total, y = 0.0, float(ranks - 1 - rank)
        for step in range(ranks):
            source, x = (rank - step) % ranks, step * 1.15
            box(axis, x, y, 0.78, 0.78, "white", edgecolor="#999999", linewidth=0.9)
            look = {"facecolor": GROUP_COLOURS[source % 7], "hatch": in_turn(HATCHES, source), "edgecolor": "white"}
            for queries, keys, diagonal in meetings(rank, source, ranks, pieces * ranks, layout):
                left, top = x + keys.start * size, y + 0.78 - queries.start * size
                corners = [(left, top), (left, top - size), (left + size, top - size)]
                corners += [] if diagonal else [(left + size, top)]
                axis.add_patch(Polygon(corners, linewidth=0.5, **look))
                total += (0.5 if diagonal else 1.0) / pieces**2
            axis.text(x + 0.39, y + 0.39, str(source), ha="center", va="center", fontsize=8, bbox=ON_WHITE)
        axis.text(ranks * 1.15, y + 0.39, f"{total:g}", ha="center", va="center", fontsize=9)
        work.append(total)
    axis.text(ranks * 1.15, ranks - 0.1, "work", ha="center", va="bottom", fontsize=9)
    axis.set(xlim=(-0.1, ranks * 1.15 + 0.35), ylim=(-0.15, ranks + 0.15), title=layout)
    axis.set_xticks([s * 1.15 + 0.39 for s in range(ranks)], [f"step {s}" for s in range(ranks)])
    axis.set_yticks([ranks - 1 - r + 0.39 for r in range(ranks)], [f"rank {r}" for r in range(ranks)])
    axis.set_xlabel("number: whose keys and values are here", fontsize=9)
    axis.tick_params(length=0)
    return work
