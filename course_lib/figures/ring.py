"""Lesson 8's picture of context parallelism: whose keys each rank meets at each step of a ring, and the work it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.figures.style import GROUP_COLOURS, HATCHES, ON_WHITE, box, in_turn, new_figure, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.figures.style import Picture


def ring_steps(ranks: int) -> Picture:
    """Whose keys and values are with which rank at each step of ring attention, and what is computed with them.

    A square is a rank's queries (from top to bottom) against the keys that are there (from left to right). White is the
    future, which no query may see; beside each row stands its work, in squares: a diagonal block counts as half.
    """
    layouts = ("contiguous", "zigzag")
    figure, axes = new_figure(min(8.2, 2.2 + 2 * ranks), 0.85 + 0.62 * ranks, columns=2, grid="")
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

    def chunks(rank: int) -> tuple[int, ...]:
        """The chunks of the sequence that a rank holds."""
        return (rank, 2 * ranks - 1 - rank) if layout == "zigzag" else (rank,)

    size = 0.78 / len(chunks(0))
    axis.set_aspect("equal")
    axis.spines[["left", "bottom"]].set_visible(False)
    work = []
    for rank in range(ranks):
        total, y = 0.0, float(ranks - 1 - rank)
        for step in range(ranks):
            source, x = (rank - step) % ranks, step * 1.15
            box(axis, x, y, 0.78, 0.78, "white", edgecolor="#999999", linewidth=0.9)
            look = {"facecolor": GROUP_COLOURS[source % 7], "hatch": in_turn(HATCHES, source), "edgecolor": "white"}
            pairs = [(i, j, q == k) for i, q in enumerate(chunks(rank)) for j, k in enumerate(chunks(source)) if k <= q]
            for i, j, diagonal in pairs:
                left, top = x + j * size, y + 0.78 - i * size
                corners = [(left, top), (left, top - size), (left + size, top - size)]
                corners += [] if diagonal else [(left + size, top)]
                axis.add_patch(Polygon(corners, linewidth=0.5, **look))
                total += (0.5 if diagonal else 1.0) / len(chunks(0)) ** 2
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
