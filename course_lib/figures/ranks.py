"""All ranks of a run side by side: one small panel per metric, one line per rank."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.figures.style import legend_below, line_style, new_figure, picture
from course_lib.units import nice_number

if TYPE_CHECKING:
    from course_lib.figures.style import Picture

Series = Sequence[tuple[int, float]]  # (step, value)
PANELS = {  # metric -> (what its axis says, by what its values are divided)
    "loss": ("loss (nats per token)", 1.0),
    "weight_norm": ("norm of the weights", 1.0),
    "computing": ("computing (ms)", 0.001),
    "waiting": ("all-reduce, with waiting (ms)", 0.001),
    "utilization": ("utilization (%)", 1.0),
    "memory_bytes": ("memory (GiB)", 2.0**30),
}
MARKED = 12  # markers per line: enough to tell lines apart in grey


def side_by_side(
    runs: str | os.PathLike[str] | Mapping[int, Mapping[str, Series]],
    *,
    title: str = "All ranks, side by side",
) -> Picture:
    """Losses, times, utilization and memory of every rank, over the steps.

    Args:
        runs: a folder with TensorBoard's event files of each rank, in rank0, rank1, …; or {rank: {metric: series}}.
        title: of the picture.
    """
    if not isinstance(runs, Mapping):
        runs = _read(Path(runs))
    logged = {name for numbers in runs.values() for name, series in numbers.items() if len(series)}
    chosen = [name for name in PANELS if name in logged]
    if not chosen:
        raise ValueError(
            f"No rank logged any of {', '.join(PANELS)}. Logged: {', '.join(sorted(logged)) or 'nothing'}."
        )
    columns = min(2, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure, axes = new_figure(height=0.7 + 2.1 * rows, rows=rows, columns=columns)
    summary, handles = [], {}
    for axis, metric in zip(axes, chosen, strict=False):
        label, unit = PANELS[metric]
        ends = []
        for rank, numbers in sorted(runs.items()):
            points = [(step, value / unit) for step, value in numbers.get(metric, ())]
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


def _read(folder: Path) -> dict[int, dict[str, Series]]:
    """The scalars of each rank. Of a last record that a killed rank did not finish, nothing is read."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, dict[str, Series]] = {}
    for path in folder.glob("rank*"):
        if match := re.fullmatch(r"rank(\d+)", path.name):
            events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()  # 0: all of them
            scalars = {
                name: {event.step: event.value for event in events.Scalars(name)} for name in events.scalars.Keys()
            }
            # a step that a resumed run did again counts with its later value
            found[int(match[1])] = {name: sorted(values.items()) for name, values in scalars.items()}
    if not found:
        raise ValueError(f"{folder} has no folder of a rank: write each rank's metrics to rank0, rank1, … in it.")
    return found
