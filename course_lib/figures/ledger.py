"""The learner's ledger as a picture: what was predicted, what was measured, and what the difference is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, HATCHES, in_turn, legend_below, new_figure, picture
from course_lib.notebook.ledger import amount

if TYPE_CHECKING:
    from course_lib.figures.style import Picture

MEASURED, UNEXPLAINED = COLOURS[0], "#BBBBBB"
LEAST = 0.5  # percent to either side of 0: a residual from rounding must not look like one that needs a reason


def ledger(entries: Sequence[Any]) -> Picture:
    """Left: measured beside predicted. Right: the residual, part by part as ``measured(..., parts=...)`` named them.

    Args:
        entries: what ``course_lib.notebook.ledger.entries()`` gives.

    Raises:
        ValueError: nothing has been measured yet.
    """
    known = [e for e in entries if e.measured is not None and e.predicted]
    if not known:
        raise ValueError("The ledger holds no measured prediction yet: run a cell with predict(...) and measured(...).")
    keys = 3 + len({name for e in known for name in e.parts})  # of the legend, four per line
    height = 1.3 + 0.55 * len(known) + 0.25 * -(-keys // 4)
    figure, (both, residual) = new_figure(width=9.5, height=height, columns=2, grid="x")
    rows = list(reversed(range(len(known))))
    both.barh(rows, [100] * len(known), height=0.7, facecolor="none", edgecolor="black", label="predicted")
    share = [100 * e.measured / e.predicted for e in known]
    both.barh(rows, share, height=0.4, color=MEASURED, label="measured")
    both.set_yticks(
        rows, [f"{e.name}\n{amount(e.predicted, '')} to {amount(e.measured, e.unit)}" for e in known], fontsize=9
    )
    both.set(xlabel="percent of predicted", title="Predicted and measured", xlim=(0, max(110.0, *share) * 1.02))
    _draw_residuals(residual, rows, known)
    drawn = {}  # one entry of each name
    for axis in (both, residual):
        drawn |= {name: handle for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    legend_below(figure, drawn)
    pairs = "; ".join(
        f"{e.name}: predicted {amount(e.predicted, e.unit)}, measured {amount(e.measured, e.unit)}" for e in known
    )
    return picture(figure, f"Your ledger, predicted against measured. {pairs}.")


def _draw_residuals(axis: Any, rows: Sequence[int], known: Sequence[Any]) -> None:
    names: dict[str, int] = {}  # of parts, in the order of their first use -> style
    for row, entry in zip(rows, known, strict=True):
        ends = {+1: 0.0, -1: 0.0}  # contributions of either sign grow away from zero
        for name, size in {**entry.parts, "unexplained": entry.unexplained}.items():
            percent = 100 * size / abs(entry.predicted)
            side = 1 if percent >= 0 else -1
            style = 0 if name == "unexplained" else names.setdefault(name, len(names) + 1)
            colour = COLOURS[style % 7] if style else UNEXPLAINED
            look = {"color": colour, "hatch": in_turn(HATCHES, style), "edgecolor": "white"}
            axis.barh(row, percent, left=ends[side], height=0.4, label=name, **look)
            ends[side] += percent
        axis.annotate(f" {entry.percent:+.2f} %", (max(ends[1], 0.0), row), va="center", fontsize=9)
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks([])
    axis.set(
        xlabel="residual, percent of predicted", title="What the difference is made of", ylim=(-0.6, len(rows) - 0.4)
    )
    axis.margins(x=0.25)
    low, high = axis.get_xlim()
    axis.set_xlim(min(low, -LEAST), max(high, LEAST))
