"""How many GPUs, which link, what bucket size: the step of data parallelism, simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.collectives.links import LINKS
from course_lib.figures.training import timeline
from course_lib.memory import PRESETS
from course_lib.notebook.widgets.panel import menu, panel, slider
from course_lib.parallel.buckets import bucketed_step
from course_lib.units import MIB

if TYPE_CHECKING:
    import ipywidgets

MODEL, FLOPS = "llama-3.1-8b", 400e12  # FLOP/s that a GPU reaches
NETWORKS = ("nvlink4", "infiniband-ndr", "ethernet-100", "ethernet-10")


def bucket_explorer() -> ipywidgets.VBox:
    """Llama-3.1-8B with bf16 gradients, at 6 FLOPs per parameter and token and 400 TFLOP/s per GPU, on a ring of GPUs."""
    parameters = PRESETS[MODEL].parameters

    def draw(bucket: int, tokens: int, ranks: int, link: str) -> str:
        compute = 6 * parameters * tokens / FLOPS
        seconds, spans = bucketed_step(
            bucket * MIB, gradient_bytes=2 * parameters, compute=compute, link=link, ranks=ranks
        )
        title = f"{len(spans) - 2} buckets: {seconds:.2f} s a step, {compute:.2f} s of it computing"
        title += f"; {ranks * compute / seconds:.1f} times one GPU"
        return timeline([spans], title=title, names=["each GPU"]).html

    return panel(
        {
            "bucket": slider("bucket, MiB", [1, 5, 25, 100, 400, 1600, 16_000], 400),
            "tokens": slider("tokens per GPU", [2**i for i in range(10, 18)], 4096),
            "ranks": slider("GPUs", [1, 2, 4, 8, 16, 32, 64], 8),
            "link": menu("link", {LINKS[name].name: name for name in NETWORKS}, "infiniband-ndr"),
        },
        draw,
    )
