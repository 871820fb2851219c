"""Pictures of lesson 5: bytes per rank by method, and what a step sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import (
    COLOURS,
    legend_below,
    new_figure,
    note_above,
    picture,
    require,
)
from course_lib.units import GB, MIB, nice_bytes, nice_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.figures.style import Picture

CATEGORIES = {  # keys of `course_lib.memory.sharded.resident_bytes` and of run.memory -> the legend's words
    "parameters": ("parameters", COLOURS[0], ""),
    "gathered": ("gathered parameters", "#BBBBBB", ".."),
    "gradients": ("gradients", COLOURS[1], "//"),
    "optimizer_state": ("optimizer state", COLOURS[2], "\\\\"),
    "master": ("master copies", COLOURS[4], "xx"),
    "ddp_buckets": ("buckets", "#777777", "||"),
    "buckets": ("buckets", "#777777", "||"),
    "activations": ("activations", COLOURS[5], "++"),
}
KINDS = {
    "all_reduce": (COLOURS[3], "//"),
    "reduce_scatter": (COLOURS[1], "\\\\"),
    "all_gather": (COLOURS[0], ""),
    "broadcast": (COLOURS[5], ".."),
    "reduce": (COLOURS[2], "xx"),
}


def bytes_by_stage(rows: Sequence[Mapping[str, Any]], *, title: str = "Bytes on one rank", note: str = "") -> Picture:
    """One bar per method, stacked by category as measured or computed, and below it what was predicted, in outline.

    Args:
        rows: each with "name", "measured" or "computed" (category -> bytes, as in run.memory; see CATEGORIES, other keys
            are not drawn), and "predicted" (category -> bytes, or one number for the sum), or one of these.
        note: what the figures rest on, below the title ("2 ranks, tiny Llama, fp32").
    """
    require(rows, "row")
    figure, (axis,) = new_figure(height=1.75 + 0.52 * len(rows), grid="x")
    summary, shown, longest = [], {}, 0.0
    kinds = {"measured": (0.46, 0.12), "computed": (0.46, 0.12), "predicted": (0.2, -0.25)}
    most = max(sum(size for _, size in _parts(row.get(which))) for row in rows for which in kinds)
    unit, unit_name = (GB, "GB") if most > GB else (MIB, "MiB")
    for place, row in zip(range(len(rows))[::-1], rows, strict=True):
        totals = []
        for which, (height, offset) in kinds.items():
            left, parts = 0.0, _parts(row.get(which))
            if not parts and not (which == "computed" and which in row):
                continue
            for name, size in parts:
                label, colour, hatch = CATEGORIES.get(name, ("", "white", ""))
                look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white"}
                if which == "predicted":
                    label, look = which, {"facecolor": "none", "edgecolor": "black", "linewidth": 1.2}
                shown.setdefault(label, axis.barh(place + offset, size / unit, height, left=left, **look))
                left += size / unit
            total = f"{nice_number(left)} GB" if unit == GB else nice_bytes(left * unit)
            totals.append(f"{which} {total}")
            if which != "predicted":
                _beside(axis, left, place + offset, total)
            longest = max(longest, left)
        if not totals:
            raise ValueError(f"The row {row.get('name')!r} has no bytes to draw: give measured, computed or predicted.")
        summary.append(f"{row['name']}: {', '.join(totals)}")
    axis.set_yticks(range(len(rows)), [str(row["name"]) for row in reversed(rows)])
    axis.set(xlabel=f"{unit_name} on one rank", title=title, xlim=(0, 1.17 * longest), ylim=(-0.6, len(rows) - 0.5))
    note_above(axis, note)
    legend_below(figure, dict(sorted(shown.items(), key=lambda entry: entry[0] == "predicted")))  # the outline last
    return picture(figure, f"{title}{f' ({note})' if note else ''}: {'; '.join(summary)}.")


def _parts(held: Mapping[str, int] | float | None) -> list[tuple[str, float]]:
    """(category, bytes) of what is to be drawn; a number alone has no category."""
    if held is None:
        return []
    if not isinstance(held, Mapping):
        return [("", float(held))]
    return [(name, held[name]) for name in CATEGORIES if held.get(name)]


def _beside(axis: Axes, x: float, y: float, text: str) -> None:
    axis.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def traffic(rows: Sequence[Mapping[str, Any]], *, title: str = "Sent by one rank in a step", note: str = "") -> Picture:
    """One bar per method, stacked by kind of collective as counted, and a mark where the formula says.

    Args:
        rows: each with "name", "counted" (kind of collective -> bytes sent, or one number for the sum), and, where there
            is one, "formula" (bytes).
        note: what the figures rest on.
    """
    require(rows, "row")
    figure, (axis,) = new_figure(height=1.7 + 0.42 * len(rows), grid="x")
    summary, shown, longest = [], {}, 0.0
    for place, row in zip(range(len(rows))[::-1], rows, strict=True):
        counted = row["counted"] if isinstance(row["counted"], Mapping) else {"all collectives": row["counted"]}
        left = 0.0
        for kind, size in counted.items():
            colour, hatch = KINDS.get(kind, ("#999999", "++"))
            bar = axis.barh(place, size / MIB, 0.55, left=left, color=colour, hatch=hatch, edgecolor="white")
            shown.setdefault(kind, bar)
            left += size / MIB
        summary.append(f"{row['name']}: counted {nice_bytes(left * MIB)}")
        if row.get("formula") is not None:
            formula = row["formula"] / MIB
            (mark,) = axis.plot([formula], [place], "D", markerfacecolor="white", markeredgecolor="black", markersize=8)
            shown.setdefault("formula", mark)
            summary[-1] += f", formula {nice_bytes(row['formula'])}"
            longest = max(longest, formula)
        longest = max(longest, left)
    axis.set_yticks(range(len(rows)), [str(row["name"]) for row in reversed(rows)])
    axis.set(xlabel="MiB sent by one rank in one step", title=title, xlim=(0, 1.06 * longest or 1))
    note_above(axis, note)
    legend_below(figure, shown)
    return picture(figure, f"{title}{f' ({note})' if note else ''}: {'; '.join(summary)}.")
