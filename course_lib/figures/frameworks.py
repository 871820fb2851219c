"""One model through every framework: what a rank holds, what it sends and how long a step takes, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, new_figure, picture, require
from course_lib.units import MIB, nice_bytes

if TYPE_CHECKING:
    from course_lib.figures.style import Picture

PANELS = {  # key of a row -> (label of its axis, what a bar's end says, scale, colour, hatch)
    "held": ("weights and optimizer\non a rank (MiB)", nice_bytes, MIB, COLOURS[0], ""),
    "sent": ("sent by a rank\nin a step (MiB)", nice_bytes, MIB, COLOURS[1], "//"),
    "seconds": ("a step, here (ms)", lambda seconds: f"{1000 * seconds:.0f} ms", 1e-3, COLOURS[2], ".."),
}


def compare(rows: Sequence[Mapping[str, Any]], *, title: str) -> Picture:
    """A line per method, with three bars: bytes held, bytes sent, seconds.

    Args:
        rows: each with "name", "ranks", "held" and "sent" (bytes), "seconds"; None where nothing was measured, which
            the picture says.
    """
    require(rows, "row")
    missing = sorted({key for row in rows for key in ("name", "ranks", *PANELS) if key not in row})
    if missing:
        raise ValueError(f"Each row needs {', '.join(missing)}; give None for what was not measured.")
    figure, axes = new_figure(9.0, 1.3 + 0.33 * len(rows), columns=3, grid="x")
    names = [f"{row['name']}  ({row['ranks']} rank{'s' if row['ranks'] > 1 else ''})" for row in rows]
    summary = {name: [] for name in names}
    places = range(len(rows))[::-1]
    for axis, (key, (label, words, scale, colour, hatch)) in zip(axes, PANELS.items(), strict=True):
        longest = max((row[key] or 0) / scale for row in rows) or 1.0
        for place, name, row in zip(places, names, rows, strict=True):
            length = (row[key] or 0) / scale
            text = "not measured" if row[key] is None else words(row[key])
            summary[name].append(f"{key} {text}")
            axis.barh(place, length, 0.62, facecolor=colour, hatch=hatch, edgecolor="white")
            axis.annotate(text, (length, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
        axis.set(xlabel=label, xlim=(0, 1.4 * longest), ylim=(-0.6, len(rows) - 0.4))
        axis.set_yticks(list(places), names if axis is axes[0] else [""] * len(rows), fontsize=8)
    figure.suptitle(title, fontsize=10)
    lines = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in summary.items())
    return picture(figure, f"{title}. {lines}.")
