"""Each split of a model as one picture: a matrix by columns and rows, heads, the vocabulary, and layers between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.figures.style import COLOURS, GROUP_COLOURS, HATCHES, ON_WHITE, box, diagram, picture
from course_lib.units import nice_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.figures.style import Picture

SENT = COLOURS[3]  # where ranks talk to each other


def column_then_row() -> Picture:
    """An MLP's two matrices, the first cut by columns and the second by rows: a line per rank, with what is sent, and where."""
    ranks = 2
    title = "One MLP, cut over ranks"
    figure, axis = diagram(8.6, 1.5 + 1.15 * ranks, title)
    cut = 1 / ranks
    for rank in range(ranks):
        y = (ranks - 1 - rank) * 1.7
        axis.text(-0.35, y + 0.6, f"rank {rank}", ha="right", va="center", fontsize=9)
        subscript = "₀₁₂₃"[rank]
        _matrix(axis, 0, y, 0.8, 1.2, None, "X")
        _matrix(axis, 2.1, y, 0.8, 1.2, None, "X")
        _matrix(axis, 3.4, y + 0.2, 1.6 * cut, 0.8, rank, f"A{subscript}")
        _matrix(axis, 4.8, y, 1.6 * cut, 1.2, rank, f"Y{subscript}")
        _matrix(axis, 6.15, y + 0.6 - 0.8 * cut, 0.8, 1.6 * cut, rank, f"B{subscript}")
        _matrix(axis, 7.5, y, 0.8, 1.2, rank, f"Z{subscript}")
        _matrix(axis, 9.6, y, 0.8, 1.2, None, "Z")
        for x, sign in ((3.15, "×"), (4.5, "="), (5.88, "×"), (7.22, "=")):
            axis.text(x, y + 0.6, sign, ha="center", va="center", fontsize=12)
        for x in (0.85, 1.65, 8.35, 9.15):
            axis.annotate("", (x + 0.4, y + 0.6), (x, y + 0.6), arrowprops={"arrowstyle": "->", "linewidth": 1.2})
    top = (ranks - 1) * 1.7 + 1.2
    for x, name, forward, backward in ((1.45, "f", "nothing", "all-reduce"), (8.95, "g", "all-reduce", "nothing")):
        sends = forward != "nothing"
        box(axis, x - 0.16, -0.1, 0.32, top + 0.2, SENT if sends else "white", edgecolor=SENT, linewidth=2)
        colour = "white" if sends else "black"
        axis.text(x, top / 2, name, ha="center", va="center", fontsize=12, weight="bold", color=colour)
        axis.text(x, -0.6, f"forward: {forward}\nbackward: {backward}", ha="center", va="top", fontsize=8.5)
    shapes = {
        2.5: "s × h",
        3.4 + 0.8 * cut: f"h × m/{ranks}",
        4.8 + 0.8 * cut: f"act(X A): s × m/{ranks}",
        6.55: f"m/{ranks} × h",
        7.9: "summand of Z",
    }
    for x, shape in shapes.items():
        axis.text(x, -0.25, shape, ha="center", va="top", fontsize=8.5)
    axis.set(xlim=(-1.3, 10.6), ylim=(-1.3, top + 0.2))
    return picture(
        figure,
        f"{title}: {ranks} ranks, a line each. A rank multiplies X by its columns of A, applies the activation, and "
        f"multiplies that by its rows of B, which gives a summand of Z; between the two nothing is sent. Before A, at f: "
        f"forward nothing, backward all-reduce. After B, at g: forward all-reduce, backward nothing.",
    )


def heads_over_ranks(*, heads: int = 8, kv_heads: int = 4, ranks: int = 2) -> Picture:
    """Query heads above, the kv heads that they read below, coloured and hatched by the rank that holds them."""
    _between("heads", heads, 1, 16)
    _between("ranks", ranks, 1, 8)
    if kv_heads < 1 or heads % kv_heads or kv_heads % ranks:
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}, ranks={ranks}: kv heads must divide the heads, and ranks the kv heads."
        )
    title = "Attention's heads over ranks"
    figure, axis = diagram(7.5, 2.7, title)
    group, share, gap = heads // kv_heads, heads // ranks, 0.5
    places = [head + head // share * gap for head in range(heads)]
    axis.text(-0.2, 1.85, "queries", ha="right", va="center", fontsize=8.5)
    axis.text(-0.2, 0.35, "keys, values", ha="right", va="center", fontsize=8.5)
    for head, x in enumerate(places):
        _matrix(axis, x, 1.5, 0.84, 0.7, head // share, f"q{head}")
    for kv in range(kv_heads):
        readers = places[kv * group : (kv + 1) * group]
        middle = (readers[0] + readers[-1] + 0.84) / 2
        _matrix(axis, middle - 0.42, 0, 0.84, 0.7, kv * ranks // kv_heads, f"kv{kv}")
        for x in readers:
            axis.plot([x + 0.42, middle], [1.5, 0.7], color="black", linewidth=0.9, zorder=0)
    for rank in range(ranks):
        first, last = places[rank * share], places[rank * share + share - 1] + 0.84
        axis.text((first + last) / 2, 2.6, f"rank {rank}", ha="center", va="bottom", fontsize=9)
        if rank:
            axis.axvline(first - 0.08 - gap / 2, color="black", linestyle="--", linewidth=1)
    axis.set(xlim=(-0.16 * places[-1], places[-1] + 1.1), ylim=(-0.4, 3.1))
    return picture(
        figure,
        f"{title}: {group} of {heads} query heads read each of {kv_heads} kv heads. Each of {ranks} ranks holds {share} query "
        f"heads and what they read, kv heads {kv_heads // ranks} in number, so attention itself sends nothing.",
    )


def vocabulary_loss() -> Picture:
    """Llama 3's logits in fp32 cut by vocabulary: what stays on a rank, and the three numbers per token that are all-reduced."""
    tokens, vocab, ranks = 8192, 128_256, 4
    title = "The loss without gathering logits"
    figure, axis = diagram(8.2, 3.1, title)
    width, owner, small = 5.6 / ranks, ranks - 2, {"ha": "center", "fontsize": 8.5}
    on_each = nice_bytes(4 * tokens * vocab / ranks)
    for rank in range(ranks):
        _matrix(axis, rank * width, 1.0, width * 0.96, 1.5, rank, f"rank {rank}")
        axis.text((rank + 0.48) * width, 2.6, on_each, va="bottom", **small)
    x = owner * width + width * 0.78
    axis.plot([x], [1.35], "D", color="black", markersize=6, markeredgecolor="white", zorder=5)
    arrow = {"arrowstyle": "->"}
    axis.annotate("the label's logit\nlies on one rank", (x, 1.3), (x, 0.62), va="top", arrowprops=arrow, **small)
    axis.text(-0.12, 1.75, "tokens", rotation=90, ha="right", va="center", fontsize=8.5)
    axis.text(0, 0.85, "vocabulary →", ha="left", va="top", fontsize=8.5)
    for i, name in enumerate(("largest\nlogit", "sum of\nexp", "label's\nlogit")):
        x = 6.35 + i * 0.95
        box(axis, x, 1.0, 0.3, 1.5, SENT)
        axis.text(x + 0.15, 0.9, name, va="top", **small)
    axis.text(7.45, 2.6, f"all-reduced: 3 × {nice_bytes(4 * tokens)}", va="bottom", **small)
    axis.annotate("", (6.25, 1.75), (5.65, 1.75), arrowprops={"arrowstyle": "<->", "linewidth": 1.6})
    axis.set(xlim=(-0.5, 8.9), ylim=(-0.15, 2.95))
    return picture(
        figure,
        f"{title}: the logits of {tokens:,} tokens are cut by vocabulary over {ranks} ranks, {on_each} on each, and stay "
        f"there. Sent are three numbers per token, each {nice_bytes(4 * tokens)}: the largest logit, the sum of "
        "exponentials, and the label's logit, which lies on one rank.",
    )


def inside_or_between() -> Picture:
    """Two ways to cut the same stack of layers: inside each matrix (tensor), and between layers (pipeline)."""
    layers, ranks = 4, 2
    title = "Cut inside each layer, or between layers?"
    figure, axis = diagram(8.2, 1.5 + 0.62 * layers, title)
    sends = {"ha": "left", "va": "center", "fontsize": 8.5, "color": SENT, "weight": "bold"}
    width = 3.0 / ranks
    for layer in range(layers):
        for rank in range(ranks):
            _matrix(axis, rank * width, layer, width * 0.97, 0.62, rank, "")
        axis.text(-0.15, layer + 0.31, f"layer {layer}", ha="right", va="center", fontsize=9)
        axis.text(3.15, layer + 0.31, "2 all-reduces", **sends)
        stage = layer * ranks // layers
        _matrix(axis, 5.9, layer, 3.0, 0.62, stage, f"rank {stage}")
        if layer + 1 == layers:
            continue
        border = (layer + 1) * ranks // layers != stage
        for x, look in ((1.5, {}), (7.4, {"linewidth": 3, "color": SENT} if border else {})):
            look = {"arrowstyle": "->", "linewidth": 1, "color": "black", **look}
            axis.annotate("", (x, layer + 0.99), (x, layer + 0.63), arrowprops=look)
        if border:
            axis.text(7.6, layer + 0.81, "1 send", **sends)
    for rank in range(ranks):
        axis.text(width * (rank + 0.485), layers - 0.3, f"rank {rank}", ha="center", va="bottom", fontsize=9)
    below = {
        1.5: ("tensor: inside each matrix", "all ranks at once, on the same tokens\n(sends: of the forward pass)"),
        7.4: ("pipeline: between layers", "one after another; busy with different\nmicro-batches"),
    }
    for x, (above, note) in below.items():
        axis.text(x, layers + 0.12, above, ha="center", va="bottom", fontsize=10)
        axis.text(x, -0.2, note, ha="center", va="top", fontsize=8.5)
    axis.set(xlim=(-1.1, 9.3), ylim=(-0.95, layers + 0.6))
    return picture(
        figure,
        f"{title} Left, tensor parallelism: each of {layers} layers is cut over {ranks} ranks, and sends 2 all-reduces "
        f"in its forward pass. Right, pipeline parallelism: each rank holds {layers // ranks} whole layers, and sends its "
        f"result once to the next rank, {ranks - 1} time{'s' * (ranks > 2)} in all.",
    )


def _matrix(axis: Axes, x: float, y: float, width: float, height: float, rank: int | None, name: str) -> None:
    """A rectangle in the rank's look; grey where all ranks hold the same."""
    colour, hatch = ("#DDDDDD", "") if rank is None else (GROUP_COLOURS[rank % 4], HATCHES[rank % 4])
    box(axis, x, y, width, height, colour, hatch=hatch, linewidth=0.8)
    if name:
        ground = ON_WHITE | ({"facecolor": colour} if rank is None else {})
        axis.text(x + width / 2, y + height / 2, name, ha="center", va="center", fontsize=9, bbox=ground)


def _between(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: give a whole number from {least} to {most}.")
