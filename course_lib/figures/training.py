"""Losses, and the timeline of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, legend_below, line_style, new_figure, patch, picture
from course_lib.observe.trace import joined

if TYPE_CHECKING:
    from course_lib.figures.style import Picture

MANY = 60  # more spans of a rank are drawn joined where nothing that could be seen lies between them
KINDS = {  # what a span of a timeline is -> (colour, hatch)
    "forward": (COLOURS[4], ""),
    "backward": (COLOURS[0], ""),
    "optimizer": (COLOURS[2], ".."),
    "collective": (COLOURS[1], "//"),
}


def losses(series: Mapping[str, Sequence[float]], *, title: str = "Loss of the global batch") -> Picture:
    """Loss against optimizer step, one line per method. Lines that coincide are told apart by their markers."""
    empty = [name for name, values in series.items() if not len(values)]
    if empty or not series:
        raise ValueError(f"There is no loss to draw{f' for {empty[0]!r}' if empty else ''}: give at least one step.")
    figure, (axis,) = new_figure()
    for i, (name, values) in enumerate(series.items()):
        look = line_style(i) | {"markersize": 10 - 1.5 * min(i, 4), "linewidth": 1.3}
        axis.plot(range(1, len(values) + 1), values, label=name, **look)
    axis.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title=title)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    ends = "; ".join(f"{name} from {v[0]:.3f} to {v[-1]:.3f}" for name, v in series.items())
    return picture(figure, f"{title}, by optimizer step: {ends}.")


def timeline(
    spans_by_rank: Sequence[Sequence[Any]], *, title: str, names: Sequence[str] = (), sends: str = "all-reduces"
) -> Picture:
    """What each rank computes (upper bar) and what it has on the wire (lower bar), over the milliseconds of one step.

    Args:
        spans_by_rank: for each rank, spans with ``kind``, ``start`` and ``end`` in seconds on one clock.
        names, sends: of the pairs of bars, "rank 0" and so on by default; the verb of the lower one.
    """
    ranks = len(spans_by_rank)
    names = names or [f"rank {rank}" for rank in range(ranks)]
    if not any(span.kind in KINDS for spans in spans_by_rank for span in spans):
        raise ValueError(f"There is nothing to draw: give for each rank spans of {', '.join(KINDS)} (see trace_step).")
    zero = min(span.start for spans in spans_by_rank for span in spans)
    figure, (axis,) = new_figure(height=1.1 + 0.85 * ranks, grid="")
    ticks, labels, shown = [], [], {span.kind for spans in spans_by_rank for span in spans}
    for rank, spans in enumerate(spans_by_rank):
        base = (ranks - 1 - rank) * 2.4
        for span in spans if len(spans) < MANY else joined(spans, 1e-3 * (max(s.end for s in spans) - zero)):
            if span.kind not in KINDS:
                continue
            look = dict(zip(("facecolors", "hatch"), KINDS[span.kind], strict=True))
            bar = [((span.start - zero) * 1e3, (span.end - span.start) * 1e3)]
            axis.broken_barh(bar, (base + (span.kind != "collective"), 0.85), edgecolor="white", linewidth=0.4, **look)
        ticks += [base + 1.4, base + 0.4]
        labels += [f"{names[rank]} computes", f"{names[rank]} {sends}"]
    axis.set_yticks(ticks, labels)
    axis.set(xlabel="time (ms)", title=title)
    legend_below(figure, {kind: patch(*look) for kind, look in KINDS.items() if kind in shown})
    ends = [max((span.end - zero for span in spans), default=0.0) for spans in spans_by_rank]
    counts = [sum(span.kind == "collective" for span in spans) for spans in spans_by_rank]
    lanes = "; ".join(
        f"{name}, {count} collective{'s' * (count != 1)}, {end * 1e3:.0f} ms"
        for name, count, end in zip(names, counts, ends, strict=True)
    )
    return picture(figure, f"{title}, as a timeline of computing with the collectives below it: {lanes}.")
