"""Lesson 8's pictures of pipelines: a schedule as it ran above the one it could be, and what each stage holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, HATCHES, new_figure, nice_bytes, nice_number, picture

if TYPE_CHECKING:
    from course_lib.figures.style import Picture
    from course_lib.parallel.simulate import Timeline

KINDS = {  # -> (colour, hatch, the legend's words)
    "F": (COLOURS[4], "", "forward"),
    "B": (COLOURS[1], "///", "backward"),
    "W": (COLOURS[2], "...", "backward for weights"),
}
IDLE = "#E8E8E8"
MIB = 2**20


def schedule(real: Timeline, ideal: Timeline, *, title: str) -> Picture:
    """Two timelines, one above the other: a lane a rank, a box an action with its micro-batch's number, idle time grey.

    Each fills the width, so what differs is the share of idle time; the bubble of both is written above them.

    Args:
        real: of a run on ranks, `course_lib.parallel.simulate.timeline(outcome.extra["events"])`; seconds.
        ideal: `course_lib.parallel.simulate.simulate(...)`; it is drawn with one forward as the unit of time.

    Raises:
        ValueError: timelines of different numbers of ranks.
    """
    from matplotlib.patches import Patch

    ranks = len(ideal.in_flight)
    if len(real.in_flight) != ranks:
        raise ValueError(
            f"The real timeline has {len(real.in_flight)} ranks and the ideal one {ranks}: draw equal pipelines."
        )
    figure, axes = new_figure(width=9.0, height=1.7 + 0.66 * ranks, rows=2)
    _lanes(axes[0], real, ranks, 1e3)
    axes[0].set(title=f"{title}\nreal run: {real.bubble:.1%} idle", xlabel="time (ms)")
    forward = next((event for event in ideal.events if event.kind == "F" and event.end > event.start), None)
    _lanes(axes[1], ideal, ranks, 1 / (forward.end - forward.start) if forward else 1.0)
    axes[1].set(title=f"ideal: {ideal.bubble:.1%} idle", xlabel="time (one forward = 1)")
    events = [*real.events, *ideal.events]
    shown = {event.kind for event in events}
    legend = {
        text: Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.4)
        for kind, (colour, hatch, text) in KINDS.items()
        if kind in shown
    }
    if any(event.chunk for event in events):
        legend["chunk 1: paler"] = Patch(facecolor=_pale(COLOURS[4]), edgecolor="black", linewidth=0.4)
    legend["idle"] = Patch(facecolor=IDLE)
    figure.legend(legend.values(), legend.keys(), frameon=False, ncols=len(legend), loc="outside lower center")
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

    Raises:
        ValueError: nothing to draw.
    """
    from matplotlib.patches import Patch

    if not pairs:
        raise ValueError("Give at least one schedule, with its real and its ideal timeline.")
    figure, axes = new_figure(width=9.0, height=1.0 + 0.95 * len(pairs), rows=len(pairs), columns=2)
    told, kinds = [], set()
    for row, (name, both) in enumerate(pairs.items()):
        for axis, words, timeline in zip(axes[2 * row : 2 * row + 2], ("real run", "ideal"), both, strict=True):
            _lanes(axis, timeline, len(timeline.in_flight), 1e3, numbers=False)
            axis.set_title(f"{name}, {words}: {timeline.bubble:.0%} idle", fontsize=8, loc="left")
            axis.set_xticks([])
            axis.set_yticks(
                [0, len(timeline.in_flight) - 1], ["rank 0", f"rank {len(timeline.in_flight) - 1}"], fontsize=7
            )
            kinds |= {event.kind for event in timeline.events}
        told.append(f"{name} idles {both[0].bubble:.1%} in the real run and {both[1].bubble:.1%} in the ideal")
    legend = {
        text: Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.4)
        for kind, (colour, hatch, text) in KINDS.items()
        if kind in kinds
    } | {"idle": Patch(facecolor=IDLE)}
    figure.suptitle(title, fontsize=10)
    figure.legend(legend.values(), legend.keys(), frameon=False, ncols=len(legend), loc="outside lower center")
    return picture(figure, f"{title}; time runs to the right, each line fills the width: {'; '.join(told)}.")


def _lanes(axis: Any, timeline: Timeline, ranks: int, scale: float, *, numbers: bool = True) -> None:
    axis.grid(False)
    start, width = timeline.events[0].start * scale, timeline.seconds * scale
    axis.barh(range(ranks), width, height=0.86, color=IDLE, zorder=0)
    small = len(timeline.events) / ranks > 36  # boxes too narrow for a number of the usual size
    for event in timeline.events:
        colour, hatch, _ = KINDS[event.kind]
        left, wide = event.start * scale - start, (event.end - event.start) * scale
        pale = event.chunk % 2
        face = _pale(colour) if pale else colour
        axis.broken_barh([(left, wide)], (event.rank - 0.43, 0.86), facecolors=face, hatch=hatch, linewidth=0.0,
                         edgecolor=colour if pale else "white", zorder=2)  # fmt: skip
        axis.broken_barh([(left, wide)], (event.rank - 0.43, 0.86), facecolors="none", edgecolor="black", linewidth=0.5,
                         zorder=2)  # fmt: skip
        if numbers and wide > 0.016 * width:
            axis.text(left + wide / 2, event.rank, str(event.micro_batch), ha="center", va="center",
                      fontsize=6 if small else 8, zorder=3,
                      bbox=None if not hatch else {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8})  # fmt: skip
    axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axis.set(xlim=(0, 1.003 * width), ylim=(ranks - 0.5, -0.5))


def _pale(colour: str) -> tuple[float, ...]:
    """The colour of chunk 1, 3, …, with white mixed in."""
    from matplotlib.colors import to_rgb

    return tuple(0.35 * part + 0.65 for part in to_rgb(colour))


def in_flight(held: Mapping[str, Sequence[float]], *, title: str, in_bytes: bool = False) -> Picture:
    """What each stage holds at its fullest moment, one group of bars a stage, one bar a schedule.

    Args:
        held: schedule -> for each stage the micro-batches whose activations it holds, or their bytes.
        in_bytes: the values are bytes.

    Raises:
        ValueError: nothing to draw, or schedules with different numbers of stages.
    """
    if len({len(values) for values in held.values()}) != 1:
        raise ValueError("Give at least one schedule, and the same number of stages for each.")
    stages = len(next(iter(held.values())))
    figure, (axis,) = new_figure(width=7.5, height=3.2)
    width = 0.82 / len(held)
    for i, (name, values) in enumerate(held.items()):
        at = [stage - 0.41 + (i + 0.5) * width for stage in range(stages)]
        bars = axis.bar(at, [value / MIB if in_bytes else value for value in values], width * 0.94, label=name,
                        color=COLOURS[i % 6], hatch=HATCHES[i % 7], edgecolor="white", linewidth=0.4)  # fmt: skip
        if not in_bytes:
            axis.bar_label(bars, [nice_number(value) for value in values], fontsize=8)
    axis.set_xticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axis.set(title=title, ylabel="activations, MiB" if in_bytes else "micro-batches held")
    figure.legend(frameon=False, ncols=len(held), loc="outside lower center")
    words = nice_bytes if in_bytes else nice_number
    told = "; ".join(f"{name}: {', '.join(map(words, values))}" for name, values in held.items())
    return picture(figure, f"{title}: what each of {stages} stages holds at its fullest, first stage first. {told}.")
