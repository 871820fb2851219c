"""How many stages, micro-batches and virtual stages, which schedule: a pipeline's step, simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.figures.pipeline import timelines
from course_lib.notebook.widgets.panel import menu, panel, slider
from course_lib.parallel.schedules import orders
from course_lib.parallel.simulate import simulate

if TYPE_CHECKING:
    import ipywidgets

SCHEDULES = {"GPipe": "gpipe", "1F1B": "1f1b", "interleaved 1F1B": "interleaved", "zero bubble (ZB-H1)": "zero_bubble"}


def schedule_explorer() -> ipywidgets.VBox:
    """A backward takes twice a forward, or two parts as long as a forward each; sends take no time."""

    def draw(schedule: str, stages: int, micro_batches: int, virtual_stages: int) -> str:
        kind = SCHEDULES[schedule]
        chunks = virtual_stages if kind == "interleaved" else 1
        halves = {"backward": 1.0, "weight": 1.0} if kind == "zero_bubble" else {"backward": 2.0}
        line = simulate(orders(kind, stages, micro_batches, chunks), forward=1.0, **halves)
        idle, held = line.bubble, max(line.in_flight)
        title = f"Idle: {idle:.1%} of the time, {idle / (1 - idle):.1%} of the work. "
        title += f"Kept by the fullest rank: the activations of {held:g} micro-batch{'es' * (held != 1)} in its layers"
        return timelines({schedule: line}, title=title).html

    return panel(
        {
            "schedule": menu("schedule", list(SCHEDULES), "1F1B"),
            "stages": slider("stages", [2, 3, 4, 6, 8], 4),
            "micro_batches": slider("micro-batches", [1, 2, 4, 8, 12, 16, 24, 32], 8),
            "virtual_stages": slider("virtual stages", [2, 3, 4], 2),
        },
        draw,
    )
