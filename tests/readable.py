"""Whether a figure of matplotlib can be read without its colours."""

from __future__ import annotations

import itertools
from typing import Any

from matplotlib.colors import to_rgba

GREYS_APART = 0.1
"""Difference of two greys, of 1, from which on they are told apart in one legend."""


def told_apart_in_grey(figure: Any) -> list[str]:
    """One sentence for each two entries of a legend that only their colour tells apart, where grey shows none."""
    problems = []
    plotted = {}  # by label: of error bars a legend's own handle is the bar without its marker
    for axis in figure.axes:
        plotted |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    legends = [axis.get_legend() for axis in figure.axes] + list(figure.legends)
    for legend in filter(None, legends):
        entries = [
            (text.get_text(), _drawn(plotted.get(text.get_text(), handle)))
            for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
        ]
        for (name, one), (other, two) in itertools.combinations(entries, 2):
            if _form(one) == _form(two) and abs(_grey(one) - _grey(two)) < GREYS_APART:
                problems.append(f"{name!r} and {other!r} differ by nothing but a colour that is the same grey")
    return problems


def _drawn(handle: Any) -> Any:
    """The line or patch of an entry; error bars come as several."""
    return handle[0] if isinstance(handle, tuple) and handle else handle


def _form(handle: Any) -> tuple:
    """What is left of a legend's entry without its colour."""
    found = [type(handle).__name__]
    for name in ("get_marker", "get_linestyle", "get_hatch", "get_linewidth", "get_fill", "get_fillstyle"):
        value = getattr(handle, name, lambda: None)()
        found.append(str(value))
    paths = getattr(handle, "get_paths", list)()  # scatter: the marker is a path
    found.append(str([path.vertices.round(3).tolist() for path in paths]))
    return tuple(found)


def _grey(handle: Any) -> float:
    for name in ("get_facecolor", "get_color", "get_edgecolor"):
        colour = getattr(handle, name, lambda: None)()
        if colour is None or (hasattr(colour, "__len__") and len(colour) == 0):
            continue
        if hasattr(colour, "ndim") and colour.ndim == 2:
            colour = colour[0]
        r, g, b, alpha = to_rgba(colour)
        if alpha == 0:
            continue
        return 1 - alpha * (1 - (0.299 * r + 0.587 * g + 0.114 * b))  # on white paper
    return 0.0
