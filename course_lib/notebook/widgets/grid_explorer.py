"""The rank grid of lesson 8 to play with: choose the axes, see the groups, and what a step sends along each of them."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_lib.collectives.links import link, seconds
from course_lib.figures.grid import draw_rank_grid
from course_lib.figures.style import as_html
from course_lib.memory import shape_of
from course_lib.memory.shapes import Shape
from course_lib.notebook.widgets.static_view import box_with_still
from course_lib.parallel import traffic
from course_lib.parallel.grid import AXES, NAMES, Grid

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
    "model": "llama-3.1-70b", "dp": 2, "pp": 2, "tp": 8, "cp": 1, "per_node": 8, "axis": "tp", "strategy": "fsdp",
    "micro_batch": 1, "micro_batches": 8, "seq_len": 8192, "inner": "nvswitch-h100", "outer": "infiniband-ndr",
}  # fmt: skip


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
    micro_batch: int = 1,
    micro_batches: int = 8,
    seq_len: int = 8192,
    inner: str = "nvswitch-h100",
    outer: str = "infiniband-ndr",
) -> list[AxisTraffic]:
    """Bytes and seconds a step, axis by axis, those that send most often first; axes of one rank send nothing.

    bf16 activations and weights, gradients in fp32. A pipeline's ranks hold equal parts of the model here.

    Args:
        model: as `course_lib.memory.shape_of` takes it.
        strategy: along dp: one of `course_lib.parallel.traffic.STRATEGIES`.
        micro_batch: sequences a data-parallel rank has at a time; micro_batches: how many of these in a step.
        inner, outer: links inside a machine and between machines, by `course_lib.collectives.links.LINKS`.

    Raises:
        ValueError: a model or link that is none; heads, layers or a sequence that the grid does not divide.
    """
    shape = shape_of(model)
    at = {"micro_batch": micro_batch, "seq_len": seq_len}
    copies = grid.dp * grid.cp
    sent = [
        *traffic.tensor_parallel(shape, tp=grid.tp, micro_batch=micro_batch, seq_len=_share(seq_len, grid.cp)),
        *traffic.context_parallel(shape, cp=grid.cp, tp=grid.tp, **at),
        *traffic.pipeline(shape, pp=grid.pp, cp=grid.cp, tp=grid.tp, **at),
        *traffic.data_parallel(shape.parameters / (grid.tp * grid.pp), dp=copies, strategy=strategy),
    ]
    found = []
    for axis in ("tp", "cp", "pp", "dp"):
        mine = [message for message in sent if message.axis == axis]
        if not mine:
            continue
        spans = ("dp", "cp") if axis == "dp" else (axis,)
        group = grid.groups(*spans)
        nodes = max(len({rank // per_node for rank in ranks}) for ranks in group)
        over = link(inner if nodes == 1 else outer)
        times = [message.count * (micro_batches if message.every == "micro_batch" else 1) for message in mine]
        each = [
            over.latency + message.num_bytes / over.bandwidth
            if message.collective == "send"
            else seconds("ring", message.collective, len(group[0]), message.num_bytes, over)
            for message in mine
        ]
        found.append(AxisTraffic(
            axis, len(group[0]), nodes, over.name, sum(times),
            sum(n * message.num_bytes for n, message in zip(times, mine, strict=True)),
            sum(n * second for n, second in zip(times, each, strict=True)),
        ))  # fmt: skip
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
    return (
        grid,
        found,
        (
            f"{begin}: most of the time on links goes to {slowest.axis}, {slowest.seconds:.3g} s a step over {slowest.link}."
        ),
    )


def still(**choice: Any) -> str:
    """What the explorer shows for a choice, as HTML that needs no widgets. Raises ValueError as `answer`."""
    grid, found, sentence = answer(**choice)
    chosen = START | choice
    figure, alt = draw_rank_grid(grid, axis=chosen["axis"], per_node=chosen["per_node"])
    return f"<p><b>{html.escape(sentence)}</b></p>{as_html(figure, alt)}{_table(found)}"


def grid_explorer(**start: Any) -> ipywidgets.VBox:
    """The explorer as a widget; `start` sets choices by the names of START. A page without widgets shows its start as it is.

    Raises:
        ValueError: a name that is no choice, or a start that does not fit together.
    """
    import ipywidgets as w

    first = still(**start)
    values = START | start

    wide = {"style": {"description_width": "120px"}, "layout": w.Layout(width="330px")}

    def slider(name: str, words: str, options: list[int]) -> Any:
        options = sorted({*options, values[name]})
        return w.SelectionSlider(options=options, value=values[name], description=words, **wide)

    def menu(name: str, words: str, options: Any) -> Any:
        listed = (
            list(options)
            if values[name] in [o[1] if isinstance(o, tuple) else o for o in options]
            else [*options, values[name]]
        )
        return w.Dropdown(options=listed, value=values[name], description=words, **wide)

    powers = [2**i for i in range(8)]
    controls = {
        "model": menu("model", "model", MODELS),
        "tp": slider("tp", "tp (tensor)", powers[:5]),
        "cp": slider("cp", "cp (context)", powers[:6]),
        "pp": slider("pp", "pp (pipeline)", powers[:6]),
        "dp": slider("dp", "dp (data)", powers),
        "per_node": slider("per_node", "GPUs a machine", [1, 2, 4, 8, 16]),
        "axis": menu("axis", "colour by", [(f"{axis} ({NAMES[axis]})", axis) for axis in reversed(AXES)]),
        "strategy": menu("strategy", "along dp", [(words, name) for name, words in SHARED.items()]),
        "micro_batches": slider("micro_batches", "micro-batches", powers),
        "seq_len": slider("seq_len", "tokens a sequence", [2**i for i in range(10, 18)]),
    }
    shown = w.HTML(first)

    def draw(_: Any = None) -> None:
        choice = values | {name: control.value for name, control in controls.items()}
        try:
            shown.value = still(**choice)
        except ValueError as error:  # a choice that does not fit: the sentence is the answer
            shown.value = f"<p><b>Does not fit.</b> {html.escape(str(error))}</p>"

    for control in controls.values():
        control.observe(draw, "value")
    listed = list(controls.values())
    return box_with_still([w.HBox([w.VBox(listed[:5]), w.VBox(listed[5:])]), shown], first)


def _share(seq_len: int, cp: int) -> int:
    if seq_len % cp:
        raise ValueError(f"seq_len={seq_len} does not divide over cp={cp} ranks: take a multiple of {cp} tokens.")
    return seq_len // cp


def _table(found: list[AxisTraffic]) -> str:
    if not found:
        return ""
    heads = ("axis", "ranks in a group", "link", "messages a step", "payload a step (GB)", "seconds, one after another")
    rows = [
        (one.axis if one.axis != "dp" else "dp x cp" if any(o.axis == "cp" for o in found) else "dp", one.ranks, one.link,
         f"{one.messages:,}", f"{one.payload / 1e9:.3g}", f"{one.seconds:.3g}")
        for one in found
    ]  # fmt: skip
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{cells}</table>"
