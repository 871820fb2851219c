"""Lesson 6's widget: one step of FSDP2 as it was recorded, played moment by moment, under each way of wrapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from course_lib.figures.units import units_over_step
from course_lib.notebook.widgets.panel import menu, with_fallback
from course_lib.units import MIB

if TYPE_CHECKING:
    import ipywidgets

    from course_lib.observe.units import UnitTimeline


def units_player(timelines: Mapping[str, UnitTimeline]) -> ipywidgets.VBox:
    """A menu of recorded steps and a player over the moments of the chosen one; pages without a kernel show their peaks.

    Args:
        timelines: what the reader sees -> the step, with the same modules in all of them.
    """
    import ipywidgets as w

    top = max(timeline.peak for timeline in timelines.values()) / MIB
    start = next(iter(timelines))
    wrapping = menu("units", list(timelines), start)
    last = len(timelines[start].moments) - 1
    slider = w.IntSlider(value=0, min=0, max=last, description="moment")
    play = w.Play(value=0, min=0, max=last, interval=600)
    w.jslink((play, "value"), (slider, "value"))
    shown = w.HTML()

    def drawn(name: str, index: int) -> str:
        return units_over_step(timelines[name], index, title=f"Units: {name}", top=top).html

    def redraw(_: Any = None) -> None:
        shown.value = drawn(wrapping.value, slider.value)

    for control in (wrapping, slider):
        control.observe(redraw, "value")
    redraw()
    page = "".join(drawn(name, timeline.at_peak) for name, timeline in timelines.items())
    controls = w.HBox([w.HBox([wrapping]), w.HBox([play, slider])], layout=w.Layout(flex_flow="row wrap"))
    return with_fallback([controls, shown], page)
