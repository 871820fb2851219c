"""The timeline of a training step, packed rows, and what saving costs a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import (
    COLOURS,
    GROUP_COLOURS,
    HATCHES,
    box,
    legend_below,
    line_style,
    new_figure,
    patch,
    picture,
    require,
)
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


def packing(rows: Sequence[Sequence[int]], row_length: int, *, title: str = "Packing") -> Picture:
    """The same texts one a row, and below as they are packed; a colour and hatch for each packed row.

    Args:
        rows: the lengths of the texts in each packed row, in tokens.
        row_length: tokens of a row.
    """
    require(rows, "row")
    alone = [(i, [length]) for i, row in enumerate(rows) for length in row]
    figure, (axis,) = new_figure(height=1.9 + 0.11 * len(alone) + 0.3 * len(rows), grid="")
    place, summary = 0.0, []
    for name, group, thick in (("one text per row", alone, 1), ("packed", list(enumerate(map(list, rows))), 2.6)):
        share = sum(sum(row) for _, row in group) / (row_length * len(group))
        summary.append(f"{name}: {len(group)} rows, {share:.0%} text")
        axis.text(0, place - 0.5, summary[-1], fontweight="bold")
        for i, lengths in group:
            start = 0
            for length in lengths:
                look = {"hatch": HATCHES[i % 7], "edgecolor": "white", "linewidth": 1.2}
                box(axis, start, place, length, 0.88 * thick, GROUP_COLOURS[i % 7], **look)
                start += length
            box(axis, start, place, row_length - start, 0.88 * thick, "#EEEEEE", edgecolor="#999999", linewidth=0.5)
            place += thick
        place += 2.4
    axis.spines["left"].set_visible(False)
    axis.set(xlabel="tokens of the row", title=title, xlim=(0, row_length), ylim=(place - 2, -2.2), yticks=[])
    axis.set_xticks(range(0, row_length + 1, row_length // 4))
    legend_below(figure, {"padding": patch("#EEEEEE", edge="#999999")})
    return picture(figure, f"{title}. {'; '.join(summary)}. Padding fills the rest of each row.")


def time_lost(
    minutes: Sequence[float], lost: Mapping[str, Sequence[float]], best: Mapping[str, float], *, title: str
) -> Picture:
    """Shares of the time that are no progress, one curve a case, and what the short formula calls best on each.

    Args:
        minutes: between two checkpoints.
        lost: case -> a share from 0 to 1 for each of `minutes`.
        best: case -> the minutes that the short formula gives.
    """
    require(lost, "curve")
    figure, (axis,) = new_figure(height=3.6)
    said = []
    for i, (name, shares) in enumerate(lost.items()):
        look = line_style(i) | {"marker": ""}
        axis.plot(minutes, [100 * share for share in shares], label=name, **look)
        at = min(range(len(minutes)), key=lambda place: abs(minutes[place] - best[name]))
        axis.plot(minutes[at], 100 * shares[at], **line_style(i) | {"linestyle": "", "markersize": 9})
        least = min(range(len(minutes)), key=shares.__getitem__)
        said.append(f"{name}: least {shares[least]:.1%} at {minutes[least]:.3g} minutes, formula {best[name]:.3g}")
    axis.set(xlabel="minutes between two checkpoints", ylabel="time that is no progress (%)", title=title)
    axis.set(xscale="log", ylim=(0, 40))
    axis.set_xticks([1, 3, 10, 30, 100, 300, 1000], ["1", "3", "10", "30", "100", "300", "1,000"])
    axis.legend(frameon=False, title="markers: √(2 · save · mean time between failures)")
    return picture(figure, f"{title}. {'; '.join(said)}.")
