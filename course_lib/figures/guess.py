"""A guess, a formula and a measurement on one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.figures.style import COLOURS, new_figure, picture

if TYPE_CHECKING:
    from course_lib.figures.style import Picture
    from course_lib.notebook.guesses import Measurement

WORTH_DRAWING = 0.05
"""Numbers that lie closer together than this share of the largest need no picture, unless one of them is a guess."""
WORTH_A_ROW = 0.005
"""A part that is smaller than this share of the scale would not be seen on it."""
WIDEST = 8.0
"""Numbers further apart than this factor are drawn on a logarithmic scale."""


def dot_plot(result: Measurement, *, alt: str) -> Picture | None:
    """One row each for the guess, the formula, what leads from there to the measurement, and the measurement.

    The scale spans what differs, and at least a tenth of the largest number, so that a small gap looks small. None where
    the numbers agree and nobody has guessed.
    """
    from matplotlib.ticker import LogLocator

    points = {"your guess": result.guess, "formula": result.formula, result.kind: result.measured}
    points = {name: value for name, value in points.items() if value is not None}
    bars, end = [], result.formula or 0.0
    for name, size in {**result.parts, "unexplained": result.unexplained}.items():
        if size:
            bars.append((name, end, size))
            end += size
    values = [*points.values(), *(edge for _, start, size in bars for edge in (start, start + size))]
    low, high = min(values), max(values)
    if result.guess is None and high - low <= WORTH_DRAWING * abs(high):
        return None
    bars = [bar for bar in bars if abs(bar[2]) > WORTH_A_ROW * (high - low)]
    rows = [name for name in ("your guess", "formula") if name in points] + [name for name, *_ in bars] + [result.kind]
    figure, (axis,) = new_figure(6.4, 0.55 + 0.24 * len(rows), grid="x")
    heights = {name: len(rows) - 1 - row for row, name in enumerate(rows)}
    looks = {"your guess": ("D", COLOURS[3]), "formula": ("o", "none"), result.kind: ("o", COLOURS[0])}
    for name, value in points.items():
        marker, colour = looks[name]
        axis.plot(
            value, heights[name], marker, color=colour, markeredgecolor=COLOURS[0] if colour == "none" else colour
        )
    for name, start, size in bars:
        axis.barh(heights[name], size, left=start, height=0.4, color="#7a7a7a")
    unit = result.unit
    if low > 0 and high / low > WIDEST:
        axis.set_xscale("log")
        axis.set_xlim(low / 1.3, high * 1.3)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
        axis.minorticks_off()
        unit = f"{unit} (logarithmic)".lstrip()
    else:
        room = max(0.12 * (high - low), (0.1 * abs(high) - (high - low)) / 2) or 1.0
        axis.set_xlim(low - room, high + room)
        axis.locator_params(axis="x", nbins=6)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}")
    axis.set_yticks(list(heights.values()), list(heights), fontsize=9)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel(unit, fontsize=8)
    return picture(figure, f"Dot plot: {alt}")
