"""One model through every framework: what a rank holds, what it sends and how long a step takes, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, new_figure, nice_bytes, picture

if TYPE_CHECKING:
    from course_lib.figures.style import Picture

MIB = 2**20
PANELS = {  # key of a row -> (label of its axis, what a bar's end says, scale, colour, hatch)
    "held": ("weights and optimizer\non a rank (MiB)", nice_bytes, MIB, COLOURS[0], ""),
    "sent": ("sent by a rank\nin a step (MiB)", nice_bytes, MIB, COLOURS[1], "//"),
    "seconds": ("a step, here (ms)", lambda seconds: f"{1000 * seconds:.0f} ms", 1e-3, COLOURS[2], ".."),
}


def compare(rows: Sequence[Mapping[str, Any]], *, title: str) -> Picture:
    """A line a method, with three bars: bytes held, bytes sent, seconds.

    Args:
        rows: each with "name", "ranks", "held" and "sent" (bytes), "seconds"; None where nothing was measured, which
            the picture says.

    Raises:
        ValueError: no rows, or a row without one of these keys.
    """
    if not rows:
        raise ValueError("There is nothing to draw: give at least one row.")
    missing = sorted({key for row in rows for key in ("name", "ranks", *PANELS) if key not in row})
    if missing:
        raise ValueError(f"Each row needs {', '.join(missing)}; give None for what was not measured.")
    figure, axes = new_figure(9.0, 1.3 + 0.33 * len(rows), columns=3)
    names = [f"{row['name']}  ({row['ranks']} rank{'s' if row['ranks'] > 1 else ''})" for row in rows]
    places = range(len(rows))[::-1]
    for axis, (key, (label, words, scale, colour, hatch)) in zip(axes, PANELS.items(), strict=True):
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", color="#DDDDDD", linewidth=0.8)
        values = [row[key] for row in rows]
        longest = max((value for value in values if value is not None), default=0) / scale or 1.0
        for place, value in zip(places, values, strict=True):
            if value is not None:
                axis.barh(place, value / scale, 0.62, facecolor=colour, hatch=hatch, edgecolor="white")
            axis.annotate(
                "not measured" if value is None else words(value), ((value or 0) / scale, place), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=7,
            )  # fmt: skip
        axis.set(xlabel=label, xlim=(0, 1.4 * longest), ylim=(-0.6, len(rows) - 0.4))
        axis.set_yticks(list(places), names if axis is axes[0] else [""] * len(rows), fontsize=8)
    figure.suptitle(title, fontsize=10)
    told = [
        f"{name}: " + ", ".join(f"{key} {'not measured' if row[key] is None else words(row[key])}"
                                for key, (_, words, *_) in PANELS.items())
        for name, row in zip(names, rows, strict=True)
    ]  # fmt: skip
    return picture(figure, f"{title}. {'; '.join(told)}.")
