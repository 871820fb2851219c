"""Pictures of pipelines: what each rank does when, as it ran or as simulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, legend_below, new_figure, patch, picture, require

if TYPE_CHECKING:
    from course_lib.figures.style import Picture
    from course_lib.parallel.simulate import Timeline

KINDS = {  # -> (colour, hatch, the legend's words)
    "F": (COLOURS[4], "", "forward"),
    "B": (COLOURS[1], "///", "backward"),
    "W": (COLOURS[2], "...", "backward for weights"),
}
IDLE = "#E8E8E8"


def timelines(named: Mapping[str, Timeline], *, title: str) -> Picture:
    """Timelines one below the other: a lane per rank, a box per action with its micro-batch's number, idle time grey.

    Each fills the width, so what differs is the share of idle time.

    Args:
        named: words above its lanes -> a `course_lib.parallel.simulate.Timeline`, of a run or simulated.
    """
    require(named, "timeline")
    lanes = sum(len(timeline.in_flight) for timeline in named.values())
    figure, axes = new_figure(9.0, 0.7 + 0.5 * len(named) + 0.26 * lanes, rows=len(named), grid="")
    for axis, (words, timeline) in zip(axes, named.items(), strict=True):
        _lanes(axis, timeline)
        axis.set_title(f"{words}: {timeline.bubble:.0%} idle", fontsize=9, loc="left")
        axis.set_xticks([])
    axis.set_xlabel("time →")
    figure.suptitle(title, fontsize=10)
    events = [event for timeline in named.values() for event in timeline.events]
    legend_below(figure, _legend(events), columns=6)
    idle = "; ".join(f"{words}: {timeline.bubble:.1%} idle" for words, timeline in named.items())
    return picture(figure, f"{title}. Forwards and backwards of micro-batches as boxes, a lane per rank. {idle}.")


def _legend(events: Iterable[Any]) -> dict[str, Any]:
    events = list(events)
    shown = {event.kind for event in events}
    entries = {text: patch(colour, hatch, "black") for kind, (colour, hatch, text) in KINDS.items() if kind in shown}
    if any(event.chunk for event in events):
        entries["every second virtual stage"] = patch(_pale(COLOURS[4]), edge="black")
    return entries | {"idle": patch(IDLE, linewidth=0)}


def _lanes(axis: Any, timeline: Timeline) -> None:
    from matplotlib.patches import PathPatch

    ranks = len(timeline.in_flight)
    start, width = timeline.events[0].start, timeline.seconds
    axis.barh(range(ranks), width, height=0.86, color=IDLE, zorder=0)
    size = 6 if len(timeline.events) / ranks > 36 else 8  # of numbers in narrow boxes
    boxes: dict[tuple[Any, ...], list[tuple[float, float, int]]] = {}  # face, hatch, its colour -> boxes that look so
    for event in timeline.events:
        colour, hatch, _ = KINDS[event.kind]
        left, wide = event.start - start, event.end - event.start
        look = (_pale(colour), hatch, colour) if event.chunk % 2 else (colour, hatch, "white")
        boxes.setdefault(look, []).append((left, left + wide, event.rank))
        if wide > 0.016 * width:
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8} if hatch else None
            words = {"ha": "center", "va": "center", "fontsize": size, "zorder": 3, "bbox": ground}
            axis.text(left + wide / 2, event.rank, str(event.micro_batch), **words)
    for (face, hatch, edge), places in boxes.items():
        outline = _outline(places)
        axis.add_patch(PathPatch(outline, facecolor=face, hatch=hatch, linewidth=0.0, edgecolor=edge, zorder=2))
        axis.add_patch(PathPatch(outline, fill=False, edgecolor="black", linewidth=0.5, zorder=2))
    axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axis.set(xlim=(0, 1.003 * width), ylim=(ranks - 0.5, -0.5))


def _outline(places: Sequence[tuple[float, float, int]]) -> Any:
    """One path around boxes, each (left, right, rank): a tenth of the drawing that a patch for each would be."""
    from matplotlib.path import Path

    corners = [
        [(left, rank - 0.43), (left, rank + 0.43), (right, rank + 0.43), (right, rank - 0.43), (left, rank - 0.43)]
        for left, right, rank in places
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path([corner for box in corners for corner in box], codes * len(corners))


def _pale(colour: str) -> tuple[float, ...]:
    """The colour of chunk 1, 3, …, with white mixed in."""
    from matplotlib.colors import to_rgb

    return tuple(0.35 * part + 0.65 for part in to_rgb(colour))
