"""How often to save: GPUs, seconds of a save and minutes of a restart, and what a week loses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from course_lib.figures.training import time_lost
from course_lib.notebook.widgets.panel import panel, slider

if TYPE_CHECKING:
    import ipywidgets

MINUTES = [10 ** (power / 30) for power in range(91)]  # 1 to 1,000


def save_interval_explorer(lost: Callable[[float, float, float, float], float], gpu_hours: float) -> ipywidgets.VBox:
    """Curves for this many GPUs, and for a quarter and four times as many.

    Args:
        lost: the share of the time that is no progress, by (seconds between saves, seconds of a save, mean seconds
            between failures, seconds of a restart).
        gpu_hours: of work between two failures.
    """

    def draw(gpus: int, save: int, restart: int) -> str:
        curves, best, week = {}, {}, ""
        for number in (gpus // 4, gpus, gpus * 4):
            between = gpu_hours * 3600 / number
            name = f"{number:,} GPUs, a failure every {between / 3600:,.3g} h"
            curves[name] = [lost(60 * minutes, save, between, 60 * restart) for minutes in MINUTES]
            best[name] = math.sqrt(2 * save * between) / 60
            if number == gpus:
                share = lost(60 * best[name], save, between, 60 * restart)
                week = f"A week on {gpus:,} GPUs, saved every {best[name]:,.0f} minutes, loses {share:.1%}: "
                week += f"{share * 168 * gpus:,.0f} of {168 * gpus:,} GPU-hours."
        title = f"Saves of {save} s, restarts of {restart} min"
        return f"{time_lost(MINUTES, curves, best, title=title).html}<p>{week}</p>"

    return panel(
        {
            "gpus": slider("GPUs", [4**power for power in range(2, 8)], 1024),
            "save": slider("a save, s", [1, 5, 15, 60, 300], 60),
            "restart": slider("a restart, min", [2, 10, 30], 10),
        },
        draw,
    )
