"""An MLP's two matrices, cut over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.figures.style import COLOURS, GROUP_COLOURS, HATCHES, ON_WHITE, box, diagram, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.figures.style import Picture

SENT = COLOURS[3]  # where ranks talk to each other


def column_then_row() -> Picture:
    """An MLP's two matrices, the first cut by columns and the second by rows: a line per rank, with what is sent, and where."""
    ranks = 2
    title = "One MLP, cut over two ranks"
    figure, axis = diagram(8.6, 1.5 + 1.15 * ranks, title)
    cut = 1 / ranks
    for rank in range(ranks):
        y = (ranks - 1 - rank) * 1.7
        axis.text(-0.35, y + 0.6, f"rank {rank}", ha="right", va="center", fontsize=9)
        subscript = "₀₁₂₃"[rank]
        _matrix(axis, 0, y, 0.8, 1.2, None, "X")
        _matrix(axis, 2.1, y, 0.8, 1.2, None, "X")
        _matrix(axis, 3.4, y + 0.2, 1.6 * cut, 0.8, rank, f"A{subscript}")
        _matrix(axis, 4.8, y, 1.6 * cut, 1.2, rank, f"Y{subscript}")
        _matrix(axis, 6.15, y + 0.6 - 0.8 * cut, 0.8, 1.6 * cut, rank, f"B{subscript}")
        _matrix(axis, 7.5, y, 0.8, 1.2, rank, f"Z{subscript}")
        _matrix(axis, 9.6, y, 0.8, 1.2, None, "Z")
        for x, sign in ((3.15, "×"), (4.5, "="), (5.88, "×"), (7.22, "=")):
            axis.text(x, y + 0.6, sign, ha="center", va="center", fontsize=12)
        for x in (0.85, 1.65, 8.35, 9.15):
            axis.annotate("", (x + 0.4, y + 0.6), (x, y + 0.6), arrowprops={"arrowstyle": "->", "linewidth": 1.2})
        back = {"arrowstyle": "->", "linewidth": 1.2, "linestyle": "--", "color": "#555555"}
        axis.annotate("", (0.3, y - 0.12), (10.1, y - 0.12), arrowprops=back, zorder=1)
        axis.text(
            5.1, y - 0.14, "gradients", ha="center", va="center", fontsize=8, color="#555555", bbox=ON_WHITE, zorder=2
        )
    top = (ranks - 1) * 1.7 + 1.2
    for x, name, forward, backward in ((1.45, "f", "nothing", "all-reduce"), (8.95, "g", "all-reduce", "nothing")):
        sends = forward != "nothing"
        box(axis, x - 0.16, -0.25, 0.32, top + 0.35, SENT if sends else "white", edgecolor=SENT, linewidth=2)
        colour = "white" if sends else "black"
        axis.text(x, top / 2, name, ha="center", va="center", fontsize=12, weight="bold", color=colour)
        axis.text(x, -0.75, f"forward: {forward}\nbackward: {backward}", ha="center", va="top", fontsize=8.5)
    shapes = {
        2.5: "s × h",
        3.4 + 0.8 * cut: f"h × m/{ranks}",
        4.8 + 0.8 * cut: f"act(X A): s × m/{ranks}",
        6.55: f"m/{ranks} × h",
        7.9: "partial sum of Z",
    }
    for x, shape in shapes.items():
        axis.text(x, -0.38, shape, ha="center", va="top", fontsize=8.5)
    axis.set(xlim=(-1.3, 10.6), ylim=(-1.45, top + 0.2))
    return picture(
        figure,
        f"{title}: {ranks} ranks, a line each. A rank multiplies X by its columns of A, applies the activation, and "
        f"multiplies that by its rows of B, which gives a partial sum of Z; between the two nothing is sent. Before A, at f: "
        f"forward nothing, backward all-reduce. After B, at g: forward all-reduce, backward nothing.",
    )


def _matrix(axis: Axes, x: float, y: float, width: float, height: float, rank: int | None, name: str) -> None:
    """A rectangle in the rank's look; grey where all ranks hold the same."""
    colour, hatch = ("#DDDDDD", "") if rank is None else (GROUP_COLOURS[rank % 4], HATCHES[rank % 4])
    box(axis, x, y, width, height, colour, hatch=hatch, linewidth=0.8)
    if name:
        ground = ON_WHITE | ({"facecolor": colour} if rank is None else {})
        axis.text(x + width / 2, y + height / 2, name, ha="center", va="center", fontsize=9, bbox=ground)
