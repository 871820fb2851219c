"""Lesson 6's picture: one rank's bytes over a step of FSDP2, and which modules are gathered at one moment of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.figures.style import COLOURS, HATCHES, box, legend_below, new_figure, patch, picture
from course_lib.units import MIB, nice_bytes

if TYPE_CHECKING:
    from course_lib.figures.style import Picture
    from course_lib.observe.units import UnitTimeline

SHARD, WHOLE = (COLOURS[4], HATCHES[0]), (COLOURS[1], HATCHES[1])  # colour, hatch


def units_over_step(timeline: UnitTimeline, index: int, *, title: str, top: float = 0.0) -> Picture:
    """Draw a step up to one of its moments: above the bytes so far, below what of each module is on the rank then.

    Args:
        timeline: of `course_lib.observe.units.watch_units`.
        index: of the moment.
        top: MiB at the upper edge, so that several steps share one axis; 0 takes this step's own peak.
    """
    moment = timeline.moments[index]
    sizes = [size / MIB for size in timeline.sizes]
    now = moment.event
    figure, (curve, modules) = new_figure(height=4.2, rows=2)
    figure.get_layout_engine().set(h_pad=0.08)
    grid = curve.get_gridspec()
    grid.set_height_ratios([3, 1])
    curve.step(range(len(sizes)), sizes, where="post", color="#999999", linewidth=0.8)
    curve.fill_between(range(now + 1), sizes[: now + 1], step="post", color=COLOURS[0], alpha=0.35, linewidth=0)
    curve.axvline(now, color=COLOURS[3], linewidth=1.5)
    edge = 1.08 * max(top, *sizes)
    over = next(m.event for m in timeline.moments if m.what == "backward is over")
    loss = max(m.event for m in timeline.moments if m.what.startswith("forward"))
    for name, first, last in (("forward", 0, loss), ("backward", loss, over)):
        curve.axvline(last, color="#666666", linewidth=0.8, linestyle=":")
        curve.text((first + last) / 2, 0.03 * edge, name, ha="center", va="bottom", fontsize=8)
    curve.text(len(sizes), 0.03 * edge, "step", ha="right", va="bottom", fontsize=8)
    curve.set(xlim=(0, len(sizes)), ylim=(0, edge), ylabel="MiB on this rank", xticks=[])
    curve.set_title(f"{title}\n{moment.what}: {sizes[now]:.1f} MiB; peak of the step {max(sizes):.1f} MiB", fontsize=10)
    for i, (name, whole) in enumerate(moment.gathered.items()):
        height = whole + (1 - whole) * timeline.sharded
        colour, hatch = WHOLE if whole else SHARD
        box(modules, i + 0.08, 0, 0.84, height, colour, hatch=hatch)
        box(modules, i + 0.08, 0, 0.84, 1, "none", edgecolor="#666666", linewidth=0.6)
        modules.text(i + 0.5, -0.12, name.replace(" ", "\n"), ha="center", va="top", fontsize=8)
    modules.set_axis_off()
    modules.set(xlim=(0, len(moment.gathered)), ylim=(-0.6, 1.05))
    legend_below(figure, {"this rank's shard": patch(*SHARD), "gathered, whole": patch(*WHOLE)}, columns=2)
    gathered = ", ".join(name for name, whole in moment.gathered.items() if whole) or "nothing"
    peak = nice_bytes(timeline.peak)
    return picture(figure, f"{title}, bytes on one rank; peak {peak}. {moment.what}; gathered: {gathered}.")
