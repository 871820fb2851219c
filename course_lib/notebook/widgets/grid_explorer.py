"""The rank grid of lesson 8 to play with: choose the axes, see the groups, and what a step sends along each of them."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_lib.choices import AXES, AXIS_NAMES
from course_lib.collectives.links import link, seconds
from course_lib.figures.grid import rank_grid
from course_lib.memory import shape_of
from course_lib.memory.shapes import Shape
from course_lib.notebook.page import table
from course_lib.notebook.widgets.static_view import with_fallback
from course_lib.parallel import traffic
from course_lib.parallel.grid import Grid

if TYPE_CHECKING:
    import ipywidgets

SHARED = {"fsdp": "sharded (FSDP, ZeRO-3)", "zero1": "optimizer sharded (ZeRO-1)", "ddp": "copies (DDP)"}
MODELS = (
    "llama-3.2-1b",
    "llama-3.1-8b",
    "llama-2-13b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "gpt3-175b",
    "megatron-1008b",
)
START = {
    "model": "llama-3.1-70b",
    "dp": 2,
    "pp": 2,
    "tp": 8,
    "cp": 1,
    "per_node": 8,
    "axis": "tp",
    "strategy": "fsdp",
    "micro_batch_size": 1,
    "num_microbatches": 8,
    "seq_len": 8192,
    "inner": "nvswitch-h100",
    "outer": "infiniband-ndr",
}


@dataclass(frozen=True)
class AxisTraffic:
    """What one rank sends along one axis in one optimizer step.

    Attributes:
        axis: "tp", "cp", "pp" or "dp"; gradients are averaged over dp x cp ranks, and stand under "dp".
        ranks: of a group.
        nodes: machines that a group touches.
        link: name of the link it uses: the one between machines as soon as it leaves one.
        messages: collectives or sends.
        payload: bytes, as ``course_lib.collectives.links.seconds`` takes them.
        seconds: of all of them by a ring on this link, one after another; some could run beside the computing.
    """

    axis: str
    ranks: int
    nodes: int
    link: str
    messages: int
    payload: float
    seconds: float


def axis_traffic(
    model: str | Shape,
    grid: Grid,
    *,
    per_node: int = 8,
    strategy: str = "fsdp",
    micro_batch_size: int = 1,
    num_microbatches: int = 8,
    seq_len: int = 8192,
    inner: str = "nvswitch-h100",
    outer: str = "infiniband-ndr",
) -> list[AxisTraffic]:
    """Bytes and seconds a step, axis by axis, those that send most often first; axes of one rank send nothing.

    bf16 activations and weights, gradients in fp32. A pipeline's ranks hold equal parts of the model here.

    Args:
        model: as `course_lib.memory.shape_of` takes it.
        strategy: along dp: one of `course_lib.choices.STRATEGIES` but "single".
        micro_batch_size: sequences a data-parallel rank has at a time; num_microbatches: how many of these in a step.
        inner, outer: links inside a machine and between machines, by `course_lib.collectives.links.LINKS`.

    Raises:
        ValueError: a model or link that is none; heads, layers or a sequence that the grid does not divide.
    """
    shape = shape_of(model)
    batch = {"micro_batch_size": micro_batch_size, "seq_len": seq_len}
    if seq_len % grid.cp:
        raise ValueError(
            f"seq_len={seq_len} does not divide over cp={grid.cp} ranks: take a multiple of {grid.cp} tokens."
        )
    sent = [
        *traffic.tensor_parallel(shape, tp=grid.tp, micro_batch_size=micro_batch_size, seq_len=seq_len // grid.cp),
        *traffic.context_parallel(shape, cp=grid.cp, tp=grid.tp, **batch),
        *traffic.pipeline(shape, pp=grid.pp, cp=grid.cp, tp=grid.tp, **batch),
        *traffic.data_parallel(shape.parameters / (grid.tp * grid.pp), dp=grid.dp * grid.cp, strategy=strategy),
    ]
    found = []
    for axis in ("tp", "cp", "pp", "dp"):
        messages = [message for message in sent if message.axis == axis]
        if not messages:
            continue
        groups = grid.groups("dp", "cp") if axis == "dp" else grid.groups(axis)
        size, nodes = len(groups[0]), max(len({rank // per_node for rank in ranks}) for ranks in groups)
        over = link(inner if nodes == 1 else outer)
        count, payload, total = 0, 0.0, 0.0
        for message in messages:
            times = message.count * (num_microbatches if message.every == "micro_batch" else 1)
            if message.collective == "send":
                each = over.latency + message.num_bytes / over.bandwidth
            else:
                each = seconds("ring", message.collective, size, message.num_bytes, over)
            count, payload, total = count + times, payload + times * message.num_bytes, total + times * each
        found.append(AxisTraffic(axis, size, nodes, over.name, count, payload, total))
    return found


def answer(**choice: Any) -> tuple[Grid, list[AxisTraffic], str]:
    """The grid behind a choice of the explorer (names as in START), what it sends, and one sentence about it.

    Raises:
        ValueError: a name that is no choice, or as `Grid` and `axis_traffic`.
    """
    unknown = set(choice) - set(START)
    if unknown:
        raise ValueError(f"The explorer has no {sorted(unknown)[0]!r}: it has {', '.join(START)}.")
    chosen = START | choice
    chosen.pop("axis")
    model = chosen.pop("model")
    grid = Grid(**{axis: chosen.pop(axis) for axis in AXES})
    found = axis_traffic(model, grid, **chosen)
    begin = f"{model} on {grid.size} GPU{'s' * (grid.size > 1)}"
    if not found:
        return grid, found, f"{begin}: nothing to send."
    slowest = max(found, key=lambda one: one.seconds)
    most = f"most of the time on links goes to {slowest.axis}, {slowest.seconds:.3g} s per step over {slowest.link}"
    return grid, found, f"{begin}: {most}."


def static_page(**choice: Any) -> str:
    """What the explorer shows for a choice, as HTML that needs no widgets. Raises ValueError as `answer`."""
    grid, found, sentence = answer(**choice)
    chosen = START | choice
    picture = rank_grid(grid, axis=chosen["axis"], per_node=chosen["per_node"])
    return f"<p><b>{html.escape(sentence)}</b></p>{picture.html}{_table(found)}"


def grid_explorer(**start: Any) -> ipywidgets.VBox:
    """The explorer as a widget; `start` sets choices by the names of START. A page without widgets shows its start as it is.

    Raises:
        ValueError: a name that is no choice, or a start that does not fit together.
    """
    import ipywidgets as w

    first = static_page(**start)
    values = START | start

    wide = {"style": {"description_width": "120px"}, "layout": w.Layout(width="330px")}

    def slider(name: str, description: str, options: list[int]) -> Any:
        options = sorted({*options, values[name]})
        return w.SelectionSlider(options=options, value=values[name], description=description, **wide)

    def menu(name: str, description: str, options: Mapping[str, str]) -> Any:
        known = {shown: value for value, shown in options.items()}
        return w.Dropdown(options=known, value=values[name], description=description, **wide)

    powers = [2**i for i in range(8)]
    controls = {
        "model": menu("model", "model", {name: name for name in (*MODELS, values["model"])}),
        "tp": slider("tp", "tp (tensor)", powers[:5]),
        "cp": slider("cp", "cp (context)", powers[:6]),
        "pp": slider("pp", "pp (pipeline)", powers[:6]),
        "dp": slider("dp", "dp (data)", powers),
        "per_node": slider("per_node", "GPUs a machine", [1, 2, 4, 8, 16]),
        "axis": menu("axis", "colour by", {axis: f"{axis} ({AXIS_NAMES[axis]})" for axis in reversed(AXES)}),
        "strategy": menu("strategy", "along dp", {values["strategy"]: values["strategy"]} | SHARED),
        "num_microbatches": slider("num_microbatches", "micro-batches", powers),
        "seq_len": slider("seq_len", "tokens a sequence", [2**i for i in range(10, 18)]),
    }
    shown = w.HTML(first)

    def draw(_: Any = None) -> None:
        choice = values | {name: control.value for name, control in controls.items()}
        try:
            shown.value = static_page(**choice)
        except ValueError as error:  # a choice that does not fit: the sentence is the answer
            shown.value = f"<p><b>Does not fit.</b> {html.escape(str(error))}</p>"

    for control in controls.values():
        control.observe(draw, "value")
    listed = list(controls.values())
    return with_fallback([w.HBox([w.VBox(listed[:5]), w.VBox(listed[5:])]), shown], first)


def _table(found: list[AxisTraffic]) -> str:
    if not found:
        return ""
    gradients = "dp x cp" if any(one.axis == "cp" for one in found) else "dp"
    rows = [
        {
            "axis": gradients if one.axis == "dp" else one.axis,
            "ranks in a group": str(one.ranks),
            "link": one.link,
            "messages per step": f"{one.messages:,}",
            "payload per step (GB)": f"{one.payload / 1e9:.3g}",
            "seconds, one after another": f"{one.seconds:.3g}",
        }
        for one in found
    ]
    return table(rows)._repr_html_()
