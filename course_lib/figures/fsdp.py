"""Lesson 6's pictures: memory of one rank with its units marked, one step's gathers on a trace, a mesh of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import (
    COLOURS,
    GROUP_COLOURS,
    HATCHES,
    LINES,
    ON_WHITE,
    box,
    diagram,
    legend_below,
    new_figure,
    patch,
    picture,
    require,
)
from course_lib.units import MIB, nice_bytes

if TYPE_CHECKING:
    from course_lib.figures.style import Picture

CALLS = {  # of a trace -> (colour, hatch, the legend's words)
    "computes": (COLOURS[4], "", "computing"),
    "waits": (COLOURS[3], "xx", "inside FSDP2's calls: copies and waits"),
    "all_gather": (COLOURS[1], "//", "all-gather"),
    "all_reduce": (COLOURS[2], "..", "reduce-scatter (gloo: by an all-reduce)"),
    "reduce_scatter": (COLOURS[2], "..", "reduce-scatter"),
}


def memory_by_unit(
    curves: Mapping[str, Sequence[tuple[int, int]]],
    *,
    units: Sequence[tuple[str, int, int]] = (),
    lines: Mapping[str, int] | None = None,
    title: str,
) -> Picture:
    """Bytes of one rank over a step: one curve per run, the time in which each unit of the first is at work as a band.

    Args:
        curves: name -> (nanoseconds, bytes) after each change. With several, each is stretched to the same width.
        units: (label, first, last nanosecond) of the first curve.
        lines: name -> bytes that were predicted, drawn across.
    """
    require(curves and all(len(curve) > 1 for curve in curves.values()), "curve with changes")
    figure, (axis,) = new_figure(height=3.7)
    alone = len(curves) == 1
    scales = [1e-6 if alone else 100 / max(time for time, _ in curve) for curve in curves.values()]
    top = max(size for curve in curves.values() for _, size in curve) / MIB
    for i, (name, curve) in enumerate(curves.items()):
        times, sizes = [time * scales[i] for time, _ in curve], [size / MIB for _, size in curve]
        axis.step(times, sizes, where="post", color=COLOURS[i], linestyle=LINES[i], label=name, linewidth=1.4)
    for i, (label, first, last) in enumerate(units):
        shade = "#BBBBBB" if i % 2 else "#E5E5E5"
        axis.axvspan(first * scales[0], last * scales[0], color=shade, alpha=0.6, linewidth=0)
        axis.text((first + last) / 2 * scales[0], top * 1.02, label, ha="center", va="bottom", fontsize=8)
    for i, (name, size) in enumerate((lines or {}).items()):
        axis.axhline(size / MIB, color=COLOURS[3], linestyle=LINES[(i + 1) % 7], linewidth=1.3, label=name)
        top = max(top, size / MIB)
    axis.set(xlabel="milliseconds" if alone else "% of the step", ylabel="MiB on this rank", title=title)
    axis.set_ylim(0, top * (1.12 if units else 1.06))
    axis.margins(x=0)
    if units:  # what lies before, waiting for a late rank, is of no interest
        first, last = units[0][1] * scales[0], units[-1][2] * scales[0]
        axis.set_xlim(max(0.0, first - 0.08 * (last - first)), last + 0.08 * (last - first))
    legend_below(figure, columns=2)
    peaks = "; ".join(f"{name} peaks at {nice_bytes(max(size for _, size in curve))}" for name, curve in curves.items())
    also = "".join(f"; {name} is {nice_bytes(size)}" for name, size in (lines or {}).items())
    return picture(figure, f"{title}: bytes on one rank over the step; {peaks}{also}.")


def waits(spans: Sequence[Any]) -> dict[str, float]:
    """Seconds that the computing thread of one rank spends in each of FSDP2's own stretches, the most first.

    Args:
        spans: of one rank, from `course_lib.observe.trace_step`. A stretch that lies in another one is left out.
    """
    own = sorted((s for s in spans if s.name.startswith("FSDP::")), key=lambda s: (s.start, -s.end))
    total: dict[str, float] = {}
    until = 0.0
    for span in own:
        if span.end <= until:
            continue
        until = span.end
        name = span.name.removeprefix("FSDP::").split(" ")[0]
        total[name] = total.get(name, 0.0) + span.end - span.start
    return dict(sorted(total.items(), key=lambda entry: -entry[1]))


def step_trace(traces: Mapping[str, Sequence[Any]], *, title: str) -> Picture:
    """One rank's step under each setting: above what its main thread does, below what is on the wire.

    Args:
        traces: setting -> the spans of one rank, from `course_lib.observe.trace_step`.
    """
    figure, (axis,) = new_figure(height=1.2 + 0.95 * len(traces), grid="")
    ticks, names, shown, summary = [], [], set(), []
    for i, (setting, spans) in enumerate(traces.items()):
        if not any(s.name.startswith("FSDP::") for s in spans):
            raise ValueError(f"{setting!r} has no stretch of FSDP2: trace a step of a model that fully_shard has cut.")
        base = (len(traces) - 1 - i) * 2.5
        zero = min(s.start for s in spans)
        main = next(s.thread for s in spans if s.name.startswith("FSDP::"))
        for span in spans:
            what = _what(span)
            if what is None or (what == "computes" and span.thread != main):  # gloo's threads copy and add, too
                continue
            shown.add(what)
            colour, hatch, _ = CALLS[what]
            low = base + (1.0 if what in ("computes", "waits") else 0.0)
            look = {"facecolors": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}
            bar = [((span.start - zero) * 1e3, (span.end - span.start) * 1e3)]
            axis.broken_barh(bar, (low, 0.85), zorder=3 if what == "waits" else 2, **look)
        ticks += [base + 1.4, base + 0.4]
        names += [f"{setting}: computes", "on the wire"]
        summary.append(f"{setting}: {sum(waits(spans).values()) * 1e3:.0f} ms in FSDP2's own calls")
    axis.set_yticks(ticks, names)
    axis.set(xlabel="time (ms)", title=title)
    legend_below(
        figure,
        {text: patch(colour, hatch) for name, (colour, hatch, text) in CALLS.items() if name in shown},
        columns=2,
    )
    return picture(figure, f"{title}, one rank's step on a time axis. {'; '.join(summary)}.")


def _what(span: Any) -> str | None:
    if span.kind == "collective":
        return span.name.split(":")[-1] if span.name.split(":")[-1] in CALLS else None
    if span.name.startswith("FSDP::"):
        return "waits"
    return "computes" if span.kind in ("forward", "backward", "optimizer") else None


def mesh(copies: int, shards: int, *, inside: str, between: str, title: str) -> Picture:
    """Ranks of a hybrid mesh as boxes: a row is a copy of the model, a column the ranks that hold the same shard.

    Args:
        copies, shards: of the mesh.
        inside, between: what is written at the arrows of a row and of a column.
    """
    if copies < 2 or shards < 2:
        raise ValueError(f"{copies} x {shards} is no hybrid mesh: it needs at least 2 copies and 2 shards.")
    figure, axis = diagram(7.5, 0.9 + 1.25 * copies, title)
    arrows = {"arrowstyle": "<->", "linewidth": 2.2}, {"arrowstyle": "<->", "linewidth": 1.4, "linestyle": "--"}
    for copy in range(copies):
        y = (copies - 1 - copy) * 1.6
        axis.text(-0.25, y + 0.35, f"machine {copy}", ha="right", va="center")
        for shard in range(shards):
            x = shard * 3.2
            box(axis, x, y, 1.2, 0.7, GROUP_COLOURS[shard % 4], hatch=HATCHES[shard % 4])
            name = f"rank {copy * shards + shard}\nshard {shard}"
            axis.text(x + 0.6, y + 0.35, name, ha="center", va="center", fontsize=9, bbox=ON_WHITE)
            if shard:
                axis.annotate("", (x - 0.05, y + 0.35), (x - 1.95, y + 0.35), arrowprops=arrows[0])
                axis.text(x - 1.0, y + 0.45, inside, ha="center", va="bottom", fontsize=8)
            if copy:
                axis.annotate("", (x + 0.6, y + 0.75), (x + 0.6, y + 1.55), arrowprops=arrows[1])
                axis.text(x + 0.75, y + 1.15, between, ha="left", va="center", fontsize=8)
    axis.set(xlim=(-1.4, (shards - 1) * 3.2 + 3.2), ylim=(-0.2, (copies - 1) * 1.6 + 1.1))
    alt = f"{title}: {copies} machines with {shards} ranks each. Along a row: {inside}; along a column: {between}."
    return picture(figure, alt.replace("\n", ", "))
