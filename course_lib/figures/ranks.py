"""All ranks of a run side by side: one small panel per metric, one line per rank."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib.figures.style import legend_below, line_style, new_figure, picture
from course_lib.units import nice_number

if TYPE_CHECKING:
    from course_lib.figures.style import Picture

Series = Sequence[tuple[int, float, float]]  # (step, value, time), see course_lib.observe.tracking
PANELS = {  # metric -> (what its axis says, by what its values are divided)
    "own_loss": ("own loss (nats per token)", 1.0),
    "loss": ("loss (nats per token)", 1.0),
    "tokens_per_second": ("tokens per second", 1.0),
    "memory_bytes": ("memory (GiB)", 2.0**30),
    "gradient_norm": ("gradient norm", 1.0),
    "heartbeat_gap": ("heartbeat gap (s)", 1.0),
}
MARKED = 12  # markers per line: enough to tell lines apart in grey


def side_by_side(
    runs: str | os.PathLike[str] | Mapping[int, Mapping[str, Series]],
    *,
    metrics: Sequence[str] = (),
    title: str = "All ranks, side by side",
) -> Picture:
    """Loss, tokens per second, memory, gradient norm and heartbeat of every rank, over the steps.

    Args:
        runs: the folder that `course_lib.observe.tracking.Tracker` wrote to, or what `course_lib.observe.tracking.read`
            returned.
        metrics: which to draw, in this order; empty for those of PANELS that were logged.
        title: of the picture.

    Raises:
        ValueError: none of the metrics was logged, or one that was asked for was not.
    """
    if not isinstance(runs, Mapping):
        from course_lib.observe.tracking import read

        runs = read(runs)
    logged = {name for numbers in runs.values() for name, series in numbers.items() if len(series)}
    missing = [name for name in metrics if name not in logged]
    chosen = list(metrics) or [name for name in PANELS if name in logged]
    if missing or not chosen:
        wanted = f"{', '.join(missing)}: no rank logged it" if missing else f"no rank logged any of {', '.join(PANELS)}"
        raise ValueError(f"{wanted}. Logged: {', '.join(sorted(logged)) or 'nothing'}.")
    columns = min(2, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure, axes = new_figure(height=0.7 + 2.1 * rows, rows=rows, columns=columns)
    summary, handles = [], {}
    for axis, metric in zip(axes, chosen, strict=False):
        label, unit = PANELS.get(metric, (metric, 1.0))
        ends = []
        for rank, numbers in sorted(runs.items()):
            points = [(step, value / unit) for step, value, _ in numbers.get(metric, ())]
            if not points:
                ends.append(f"rank {rank} nothing")
                continue
            look = {"markevery": max(1, len(points) // MARKED), "markersize": 8 - min(rank, 4), "linewidth": 1.3}
            (handles[rank],) = axis.plot(*zip(*points, strict=True), label=f"rank {rank}", **line_style(rank), **look)
            ends.append(f"rank {rank} {nice_number(points[-1][1])}")
        axis.set(xlabel="optimizer step", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
        summary.append(f"{label}: {', '.join(ends)}")
    for axis in axes[len(chosen) :]:
        axis.set_axis_off()
    legend_below(figure, {f"rank {rank}": handles[rank] for rank in sorted(handles)}, columns=min(8, len(handles)))
    figure.suptitle(title)
    return picture(figure, f"{title}, {len(runs)} ranks, at the last step that each logged. {'; '.join(summary)}.")
