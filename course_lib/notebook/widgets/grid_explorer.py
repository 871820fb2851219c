"""The rank grid of lesson 8 to play with: choose the axes, see the groups, and what a step sends along each of them."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.choices import AXES, AXIS_NAMES
from course_lib.collectives.links import link, ring_seconds
from course_lib.figures.grid import rank_grid
from course_lib.memory import shape_of
from course_lib.notebook.page import table
from course_lib.notebook.widgets.panel import menu, panel, slider
from course_lib.parallel import traffic
from course_lib.parallel.grid import Grid

if TYPE_CHECKING:
    import ipywidgets

SHARED = {"sharded (FSDP, ZeRO-3)": "fsdp", "optimizer sharded (ZeRO-1)": "zero1", "copies (DDP)": "ddp"}
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-2-13b", "llama-3.1-70b", "llama-3.1-405b", "gpt3-175b", "megatron-1008b")  # fmt: skip
INSIDE, BETWEEN = "nvswitch-h100", "infiniband-ndr"
"""Links inside a machine and between machines, by `course_lib.collectives.links.LINKS`."""


class AxisTraffic(NamedTuple):
    """What one rank sends along one axis in one optimizer step."""

    axis: str  # gradients are averaged over dp x cp ranks, and stand under "dp"
    ranks: int  # of a group
    nodes: int  # machines that a group touches
    link: str  # the one between machines as soon as a group leaves one
    messages: int  # collectives or sends
    payload: float  # bytes, as course_lib.collectives.links.ring_seconds takes them
    seconds: float  # of all of them by a ring on this link, one after another; some could run beside the computing


def axis_traffic(
    model: str, grid: Grid, *, per_node: int, strategy: str, num_microbatches: int, seq_len: int
) -> list[AxisTraffic]:
    """Bytes and seconds a step, axis by axis, those that send most often first; axes of one rank send nothing.

    One sequence a micro-batch, bf16 activations and weights, gradients in fp32. A pipeline's ranks hold equal parts of
    the model here. Raises ValueError for heads, layers or a sequence that the grid does not divide.

    Args:
        strategy: along dp: one of `course_lib.choices.STRATEGIES` but "single".
        per_node: GPUs of a machine.
    """
    shape = shape_of(model)
    if seq_len % grid.cp:
        raise ValueError(f"seq_len={seq_len} does not divide over cp={grid.cp} ranks: take a multiple of {grid.cp}.")
    one = {"micro_batch_size": 1, "seq_len": seq_len}
    sent = [
        *traffic.tensor_parallel(shape, tp=grid.tp, micro_batch_size=1, seq_len=seq_len // grid.cp),
        *traffic.context_parallel(shape, cp=grid.cp, tp=grid.tp, **one),
        *traffic.pipeline(shape, pp=grid.pp, cp=grid.cp, tp=grid.tp, **one),
        *traffic.data_parallel(shape.parameters / (grid.tp * grid.pp), dp=grid.dp * grid.cp, strategy=strategy),
    ]
    rows = []
    for axis in ("tp", "cp", "pp", "dp"):
        groups = grid.groups("dp", "cp") if axis == "dp" else grid.groups(axis)
        size, nodes = len(groups[0]), max(len({rank // per_node for rank in ranks}) for ranks in groups)
        over = link(INSIDE if nodes == 1 else BETWEEN)
        count, payload, total = 0, 0.0, 0.0
        for message in (message for message in sent if message.axis == axis):
            times = message.count * (num_microbatches if message.every == "micro_batch" else 1)
            if message.collective == "send":
                each = over.latency + message.num_bytes / over.bandwidth
            else:
                each = ring_seconds(message.collective, size, message.num_bytes, over)
            count, payload, total = count + times, payload + times * message.num_bytes, total + times * each
        if count:
            rows.append(AxisTraffic(axis, size, nodes, over.name, count, payload, total))
    return rows


def page(model: str, axis: str, per_node: int, **chosen: Any) -> str:
    """What the explorer shows for a choice, as HTML. Raises ValueError as `axis_traffic`."""
    grid = Grid(**{name: chosen.pop(name) for name in AXES})
    rows = axis_traffic(model, grid, per_node=per_node, **chosen)
    said = "nothing to send"
    if rows:
        slowest = max(rows, key=lambda row: row.seconds)
        said = f"most of the time on links goes to {slowest.axis}, {slowest.seconds:.3g} s per step over {slowest.link}"
    sentence = f"{model} on {grid.size} GPU{'s' * (grid.size > 1)}: {said}."
    sums = "dp x cp" if grid.cp > 1 else "dp"
    listed = [
        {
            "axis": sums if row.axis == "dp" else row.axis,
            "ranks in a group": row.ranks,
            "link": row.link,
            "messages per step": row.messages,
            "payload per step (GB)": row.payload / 1e9,
            "seconds, one after another": row.seconds,
        }
        for row in rows
    ]
    picture = rank_grid(grid, axis=axis, per_node=per_node)
    answer = f"<p><b>{html.escape(sentence)}</b></p>{table(listed)._repr_html_() if rows else ''}"
    return answer + picture.html  # the machines come last: 64 of them are taller than a window


def grid_explorer() -> ipywidgets.VBox:
    """The explorer as a widget: a model, a grid, what a machine holds, and how data-parallel ranks share the model."""
    powers = [2**i for i in range(8)]
    controls = {
        "model": menu("model", MODELS, "llama-3.1-70b"),
        "tp": slider("tp (tensor)", powers[:5], 8),
        "cp": slider("cp (context)", powers[:6], 1),
        "pp": slider("pp (pipeline)", powers[:6], 2),
        "dp": slider("dp (data)", powers, 2),
        "per_node": slider("GPUs a machine", powers[:5], 8),
        "axis": menu("colour by", {f"{axis} ({AXIS_NAMES[axis]})": axis for axis in reversed(AXES)}, "tp"),
        "strategy": menu("along dp", SHARED, "fsdp"),
        "num_microbatches": slider("micro-batches", powers, 8),
        "seq_len": slider("tokens a sequence", [2**i for i in range(10, 18)], 8192),
    }
    return panel(controls, page)
