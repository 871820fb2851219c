"""How many bytes per rank, at each of ZeRO's stages: a model's states, computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.figures.sharding import bytes_by_stage
from course_lib.notebook.widgets.panel import menu, panel, slider
from course_lib.units import GB, nice_number

if TYPE_CHECKING:
    import ipywidgets

# What the reader sees -> bytes per parameter of weights, of gradients, of Adam's states with the master copy. Offloaded
# gradients are stepped in the master copy's type, a third of the states.
PRECISIONS = {"bf16, fp32 masters": (2, 2, 12), "bf16, bf16 masters": (2, 2, 6)}


def zero_explorer() -> ipywidgets.VBox:
    """The papers' formulas: no activations, no buckets. Offloading moves each rank's share of the gradients, too."""

    def draw(billions: int, ranks: int, precision: str, offload: str) -> str:
        parameters, rows = 1e9 * billions, []
        for stage in range(4):
            sizes = PRECISIONS[precision]
            each = [size * parameters / (ranks if stage > 2 - place else 1) for place, size in enumerate(sizes)]
            moved = 0.0
            if offload != "none" and stage:
                moved, each[1:] = each[2] * 4 / 3, [0, 0]
            if offload == "all" and stage == 3:
                moved, each[0] = moved + each[0], 0
            name = f"stage {stage}" if stage else "DDP"
            name += f"\n(host: {nice_number(moved / GB)} GB)" if moved else ""
            held = dict(zip(("parameters", "gradients", "optimizer_state"), each, strict=True))
            rows.append({"name": name, "computed": held})
        title = f"{billions} billion parameters on {ranks} GPUs: weights, gradients, optimizer"
        return bytes_by_stage(rows, title=title).html

    return panel(
        {
            "billions": slider("billion parameters", [1, 3, 8, 14, 32, 70, 405], 8),
            "ranks": slider("GPUs", [1, 2, 4, 6, 8, 10, 12, 14, 16, 24, 32, 64, 512], 8),
            "precision": menu("precision", list(PRECISIONS), "bf16, fp32 masters"),
            "offload": menu("offload", ["none", "optimizer", "all"], "none"),
        },
        draw,
    )
