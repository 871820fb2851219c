"""The ring, one step at a time: a slider over the pictures of `course_lib.figures.collectives`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_lib.figures.collectives import ring_step
from course_lib.notebook.widgets.panel import with_fallback

if TYPE_CHECKING:
    import ipywidgets


def ring_stepper(ranks: int = 4) -> ipywidgets.VBox:
    """A slider from before the first to the last of the 2(n-1) steps, and the chunks as they are then."""
    import ipywidgets as w

    if not 2 <= ranks <= 8:
        raise ValueError(f"ranks={ranks}: choose from 2 to 8, so that the chunks fit on the page.")
    slider = w.IntSlider(
        value=1,  # the first moment with arrows, also where nothing can slide
        min=0,
        max=2 * (ranks - 1),
        description="step",
        continuous_update=True,
    )
    play = w.Play(value=1, min=0, max=2 * (ranks - 1), interval=1500, description="play")
    w.jslink((play, "value"), (slider, "value"))
    shown = w.HTML()

    def draw(_: Any = None) -> None:
        shown.value = ring_step(ranks, slider.value).html

    slider.observe(draw, "value")
    draw()
    return with_fallback([w.HBox([play, slider]), shown], shown.value)
