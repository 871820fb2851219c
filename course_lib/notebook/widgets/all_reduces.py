"""How many ranks, which link: the time of an all-reduce by the ways there are, over the size of the message."""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from course_lib.collectives.links import LINKS, ring_seconds
from course_lib.figures.links import seconds_by_size
from course_lib.notebook.widgets.panel import menu, panel, slider

if TYPE_CHECKING:
    import ipywidgets

SIZES = [2**power for power in range(10, 31)]
NETWORKS = ("nvlink4", "pcie5", "infiniband-ndr", "ethernet-100", "ethernet-10")


def all_reduce_explorer() -> ipywidgets.VBox:
    """Through one rank and back by a tree, round a ring, by doubling, and by halving and doubling, on rated links."""

    def draw(ranks: int, link: str) -> str:
        wire = LINKS[link]
        times = {
            "through one rank": [(ranks - 1 + log2(ranks)) * (wire.latency + size / wire.bandwidth) for size in SIZES],
            "ring": [ring_seconds("all_reduce", ranks, size, wire) for size in SIZES],
            "doubling": [log2(ranks) * (wire.latency + size / wire.bandwidth) for size in SIZES],
            "halving and doubling": [
                2 * (log2(ranks) * wire.latency + (ranks - 1) / ranks * size / wire.bandwidth) for size in SIZES
            ],
        }
        return seconds_by_size(SIZES, times, title=f"All-reduce on {ranks} ranks over {wire.name}").html

    return panel(
        {
            "ranks": slider("ranks", [2**i for i in range(1, 11)], 64),
            "link": menu("link", {LINKS[name].name: name for name in NETWORKS}, "infiniband-ndr"),
        },
        draw,
    )
