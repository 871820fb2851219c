"""The learner's ledger as a picture: what was predicted, what was measured, and what the difference is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, HATCHES, new_figure, picture
from course_lib.ledger import amount

if TYPE_CHECKING:
    from IPython.display import Image


def ledger(entries: Sequence[Any]) -> Image:
    """Each entry as measured over predicted, percent, with the residual's named parts stacked at the end of the bar.

    Args:
        entries: what ``course_lib.ledger.entries()`` gives.

    Raises:
        ValueError: nothing has been measured yet.
    """
    known = [e for e in entries if e.measured is not None and e.predicted]
    if not known:
        raise ValueError("The ledger holds no measured prediction yet: run a cell with predict(...) and measured(...).")
    figure, (axis,) = new_figure(width=9.0, height=1.2 + 0.5 * len(known))
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color="#DDDDDD")
    names: list[str] = []
    for row, entry in enumerate(reversed(known)):
        percent = 100 / entry.predicted
        axis.barh(row, entry.measured * percent, color=COLOURS[0], height=0.55, edgecolor="white")
        at = 100.0
        for i, part in enumerate(entry.parts.values(), start=1):
            axis.barh(row, part * percent, left=at, color=COLOURS[i % 7], hatch=HATCHES[i % 7], height=0.55)
            at += part * percent
        unexplained = 100 * entry.unexplained / abs(entry.predicted)
        label = f"{entry.percent:+.2f} %" + (f", {unexplained:+.2f} % unexplained" if entry.parts else "")
        axis.text(max(100, entry.measured * percent) + 1.5, row, label, va="center", fontsize=9)
        names.append(f"{entry.name}\n{amount(entry.predicted, '')} to {amount(entry.measured, entry.unit)}")
    axis.axvline(100, color="black", linewidth=1)
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="measured, percent of predicted", title="Your ledger: predicted against measured")
    axis.set_xlim(0, max(100, *(e.measured / e.predicted * 100 for e in known)) * 1.45)
    told = "; ".join(
        f"{e.name}: predicted {amount(e.predicted, e.unit)}, measured {amount(e.measured, e.unit)}" for e in known
    )
    return picture(figure, f"Predicted against measured. {told}.")
