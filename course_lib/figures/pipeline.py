"""Lesson 8's pictures of pipelines: a schedule as it ran beside the one it could be."""

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


def schedule(real: Timeline, ideal: Timeline, *, title: str) -> Picture:
    """Two timelines, one above the other: a lane per rank, a box per action with its micro-batch's number, idle time grey.

    Each fills the width, so what differs is the share of idle time; the bubble of both is written above them.

    Args:
        real: of a run on ranks, `course_lib.parallel.simulate.timeline(outcome.extra["events"])`; seconds.
        ideal: `course_lib.parallel.simulate.simulate(...)`; it is drawn with one forward as the unit of time.
    """
    ranks = len(ideal.in_flight)
    if len(real.in_flight) != ranks:
        raise ValueError(
            f"The real timeline has {len(real.in_flight)} ranks and the ideal one {ranks}: draw equal pipelines."
        )
    figure, axes = new_figure(9.0, 1.7 + 0.66 * ranks, rows=2, grid="")
    _lanes(axes[0], real, 1e3)
    axes[0].set(title=f"{title}\nreal run: {real.bubble:.1%} idle", xlabel="time (ms)")
    forward = next((event for event in ideal.events if event.kind == "F" and event.end > event.start), None)
    _lanes(axes[1], ideal, 1 / (forward.end - forward.start) if forward else 1.0)
    axes[1].set(title=f"ideal: {ideal.bubble:.1%} idle", xlabel="time (one forward = 1)")
    events = [*real.events, *ideal.events]
    legend_below(figure, _legend(events), columns=6)
    count = 1 + max(event.micro_batch for event in events)
    return picture(
        figure,
        f"{title}: {ranks} ranks, {count} micro-batches, forwards and backwards as boxes on a time axis. The real run idles "
        f"{real.bubble:.1%} of the time, the ideal schedule {ideal.bubble:.1%}.",
    )


def schedules(pairs: Mapping[str, tuple[Timeline, Timeline]], *, title: str) -> Picture:
    """Several schedules, a line each: as it ran on the left, the ideal on the right, each filling its width.

    Args:
        pairs: schedule -> (real, ideal), as `schedule` takes them.
    """
    require(pairs, "schedule, with its real and its ideal timeline")
    figure, axes = new_figure(9.0, 1.0 + 0.95 * len(pairs), rows=len(pairs), columns=2, grid="")
    for row, (name, both) in enumerate(pairs.items()):
        for axis, which, timeline in zip(axes[2 * row : 2 * row + 2], ("real run", "ideal"), both, strict=True):
            _lanes(axis, timeline, 1e3, numbers=False)
            axis.set_title(f"{name}, {which}: {timeline.bubble:.0%} idle", fontsize=8, loc="left")
            axis.set_xticks([])
            last = len(timeline.in_flight) - 1
            axis.set_yticks([0, last], ["rank 0", f"rank {last}"], fontsize=7)
    figure.suptitle(title, fontsize=10)
    legend_below(figure, _legend(event for both in pairs.values() for timeline in both for event in timeline.events))
    bubbles = "; ".join(
        f"{name} idles {real.bubble:.1%} in the real run and {ideal.bubble:.1%} in the ideal"
        for name, (real, ideal) in pairs.items()
    )
    return picture(figure, f"{title}; time runs to the right, each line fills the width: {bubbles}.")


def _legend(events: Iterable[Any]) -> dict[str, Any]:
    events = list(events)
    shown = {event.kind for event in events}
    entries = {text: patch(colour, hatch, "black") for kind, (colour, hatch, text) in KINDS.items() if kind in shown}
    if any(event.chunk for event in events):
        entries["chunk 1: paler"] = patch(_pale(COLOURS[4]), edge="black")
    return entries | {"idle": patch(IDLE, linewidth=0)}


def _lanes(axis: Any, timeline: Timeline, scale: float, *, numbers: bool = True) -> None:
    from matplotlib.patches import PathPatch

    ranks = len(timeline.in_flight)
    start, width = timeline.events[0].start * scale, timeline.seconds * scale
    axis.barh(range(ranks), width, height=0.86, color=IDLE, zorder=0)
    size = 6 if len(timeline.events) / ranks > 36 else 8  # of numbers in narrow boxes
    boxes: dict[tuple[Any, ...], list[tuple[float, float, int]]] = {}  # face, hatch, its colour -> boxes that look so
    for event in timeline.events:
        colour, hatch, _ = KINDS[event.kind]
        left, wide = event.start * scale - start, (event.end - event.start) * scale
        look = (_pale(colour), hatch, colour) if event.chunk % 2 else (colour, hatch, "white")
        boxes.setdefault(look, []).append((left, left + wide, event.rank))
        if numbers and wide > 0.016 * width:
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
