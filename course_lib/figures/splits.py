"""Each split of a model as one picture: a matrix by columns and rows, heads, the vocabulary, and layers between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, HATCHES, new_figure, nice_bytes, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.figures.style import Picture

WHOLE = "#DDDDDD"  # what every rank holds the same
SENT = COLOURS[3]  # where ranks talk to each other


def column_then_row(*, ranks: int = 2, sequence_parallel: bool = False, title: str = "") -> Picture:
    """An MLP's two matrices, the first cut by columns and the second by rows: a line a rank, with what is sent, and where.

    Args:
        ranks: lines, 2 to 4.
        sequence_parallel: before and after, each rank holds its part of the tokens only.

    Raises:
        ValueError: fewer than 2 ranks or more than 4.
    """
    _between("ranks", ranks, 2, 4)
    title = title or ("The same under sequence parallelism" if sequence_parallel else "One MLP, cut over ranks")
    figure, axis = _canvas(width=8.6, height=1.5 + 1.15 * ranks, title=title)
    cut = 1 / ranks
    for rank in range(ranks):
        y = (ranks - 1 - rank) * 1.7
        axis.text(-0.35, y + 0.6, f"rank {rank}", ha="right", va="center", fontsize=9)
        outside = {"height": 1.2 * cut, "lift": 1.2 * (1 - rank * cut - cut)} if sequence_parallel else {}
        if sequence_parallel:
            _matrix(axis, 0, y, 0.8, 1.2, None, "", ghost=True)
            _matrix(axis, 9.6, y, 0.8, 1.2, None, "", ghost=True)
        _matrix(axis, 0, y, 0.8, 1.2, rank if sequence_parallel else None, "X", **outside)
        _matrix(axis, 2.1, y, 0.8, 1.2, None, "X")
        _matrix(axis, 3.4, y, 1.6 * cut, 0.8, rank, f"A{_sub(rank)}", lift=0.2)
        _matrix(axis, 4.8, y, 1.6 * cut, 1.2, rank, f"Y{_sub(rank)}")
        _matrix(axis, 6.15, y, 0.8, 1.6 * cut, rank, f"B{_sub(rank)}", lift=0.6 - 0.8 * cut)
        _matrix(axis, 7.5, y, 0.8, 1.2, rank, f"Z{_sub(rank)}")
        _matrix(axis, 9.6, y, 0.8, 1.2, rank if sequence_parallel else None, "Z", **outside)
        for x, sign in ((3.15, "×"), (4.5, "=")):
            axis.text(x, y + 0.6, sign, ha="center", va="center", fontsize=12)
        for x, sign in ((5.88, "×"), (7.22, "=")):
            axis.text(x, y + 0.6, sign, ha="center", va="center", fontsize=12)
        for x in (0.85, 1.65, 8.35, 9.15):
            axis.annotate("", (x + 0.4, y + 0.6), (x, y + 0.6), arrowprops={"arrowstyle": "->", "linewidth": 1.2})
    top = (ranks - 1) * 1.7 + 1.2
    left = ("all-gather", "reduce-scatter") if sequence_parallel else ("nothing", "all-reduce")
    right = ("reduce-scatter", "all-gather") if sequence_parallel else ("all-reduce", "nothing")
    for x, name, (forward, backward) in ((1.45, "f", left), (8.95, "g", right)):
        sends_forward = forward != "nothing"
        axis.add_patch(
            _rectangle(x - 0.16, -0.1, 0.32, top + 0.2, SENT if sends_forward else "white", edge=SENT, line=2)
        )
        axis.text(x, top / 2, name, ha="center", va="center", fontsize=12, weight="bold",
                  color="white" if sends_forward else "black")  # fmt: skip
        axis.text(x, -0.6, f"forward: {forward}\nbackward: {backward}", ha="center", va="top", fontsize=8.5)
    axis.text(2.5, -0.25, "s × h", ha="center", va="top", fontsize=8.5)
    axis.text(3.4 + 0.8 * cut, -0.25, f"h × m/{ranks}", ha="center", va="top", fontsize=8.5)
    axis.text(4.8 + 0.8 * cut, -0.25, f"act(X A): s × m/{ranks}", ha="center", va="top", fontsize=8.5)
    axis.text(6.55, -0.25, f"m/{ranks} × h", ha="center", va="top", fontsize=8.5)
    axis.text(7.9, -0.25, "summand of Z", ha="center", va="top", fontsize=8.5)
    axis.set(xlim=(-1.3, 10.6), ylim=(-1.3, top + 0.2))
    return picture(
        figure,
        f"{title}: {ranks} ranks, a line each. A rank multiplies X by its columns of A, applies the activation, and "
        f"multiplies that by its rows of B, which gives a summand of Z; between the two nothing is sent. Before A, at f: "
        f"forward {left[0]}, backward {left[1]}. After B, at g: forward {right[0]}, backward {right[1]}.",
    )


def heads_over_ranks(*, heads: int = 8, kv_heads: int = 4, ranks: int = 2, title: str = "") -> Picture:
    """Query heads above, the kv heads that they read below, coloured and hatched by the rank that holds them.

    Raises:
        ValueError: heads, kv heads and ranks that do not divide, or more than 32 heads or 8 ranks.
    """
    _between("heads", heads, 1, 32)
    _between("ranks", ranks, 1, 8)
    if kv_heads < 1 or heads % kv_heads or kv_heads % ranks:
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}, ranks={ranks}: kv heads must divide the heads, and ranks the kv heads."
        )
    title = title or "Attention's heads over ranks"
    figure, axis = _canvas(width=7.5, height=2.7, title=title)
    group, gap = heads // kv_heads, 0.5
    places, many = [], heads > 12
    axis.text(-0.2, 1.85, "queries", ha="right", va="center", fontsize=8.5)
    axis.text(-0.2, 0.35, "keys, values", ha="right", va="center", fontsize=8.5)
    for head in range(heads):
        rank = head * ranks // heads
        x = head * 1.0 + rank * gap
        places.append(x)
        _matrix(axis, x, 1.5, 0.84, 0.7, rank, "" if many else f"q{head}")
        if many:
            axis.text(x + 0.42, 2.24, str(head), ha="center", va="bottom", fontsize=7)
    for kv in range(kv_heads):
        rank = kv * ranks // kv_heads
        first, last = places[kv * group], places[kv * group + group - 1] + 0.84
        middle = (first + last) / 2
        _matrix(axis, middle - 0.42, 0, 0.84, 0.7, rank, "" if many else f"kv{kv}")
        if many:
            axis.text(middle, -0.06, str(kv), ha="center", va="top", fontsize=7)
        for x in places[kv * group : kv * group + group]:
            axis.plot([x + 0.42, middle], [1.5, 0.7], color="black", linewidth=0.9, zorder=0)
    share = heads // ranks
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


def vocabulary_loss(*, tokens: int = 8192, vocab: int = 128_256, ranks: int = 4, title: str = "") -> Picture:
    """Logits cut by vocabulary: what stays on a rank, and the three numbers a token that are all-reduced.

    Args:
        tokens, vocab: of the logits, for their bytes in fp32.

    Raises:
        ValueError: fewer than 2 ranks or more than 8, or sizes below 1.
    """
    _between("ranks", ranks, 2, 8)
    _between("tokens", tokens, 1, 10**9)
    _between("vocab", vocab, 1, 10**9)
    title = title or "The loss without gathering logits"
    figure, axis = _canvas(width=8.2, height=3.1, title=title)
    width, owner = 5.6 / ranks, ranks - 2
    for rank in range(ranks):
        x = rank * width
        _matrix(axis, x, 1.0, width * 0.96, 1.5, rank, f"rank {rank}")
        axis.text(
            x + width * 0.48, 2.6, f"{nice_bytes(4 * tokens * vocab / ranks)}", ha="center", va="bottom", fontsize=8.5
        )
    x = owner * width + width * 0.78
    axis.plot([x], [1.35], "D", color="black", markersize=6, markeredgecolor="white", zorder=5)
    axis.annotate("the label's logit\nlies on one rank", (x, 1.3), (x, 0.62), ha="center", va="top", fontsize=8.5,
                  arrowprops={"arrowstyle": "->"})  # fmt: skip
    axis.text(-0.12, 1.75, "tokens", rotation=90, ha="right", va="center", fontsize=8.5)
    axis.text(0, 0.85, "vocabulary →", ha="left", va="top", fontsize=8.5)
    for i, words in enumerate(("largest\nlogit", "sum of\nexp", "label's\nlogit")):
        x = 6.35 + i * 0.95
        axis.add_patch(_rectangle(x, 1.0, 0.3, 1.5, SENT))
        axis.text(x + 0.15, 0.9, words, ha="center", va="top", fontsize=8.5)
    axis.text(7.45, 2.6, f"all-reduced: 3 × {nice_bytes(4 * tokens)}", ha="center", va="bottom", fontsize=8.5)
    axis.annotate("", (6.25, 1.75), (5.65, 1.75), arrowprops={"arrowstyle": "<->", "linewidth": 1.6})
    axis.set(xlim=(-0.5, 8.9), ylim=(-0.15, 2.95))
    return picture(
        figure,
        f"{title}: the logits of {tokens:,} tokens are cut by vocabulary over {ranks} ranks, "
        f"{nice_bytes(4 * tokens * vocab / ranks)} on each, and stay there. Sent are three numbers a token, each "
        f"{nice_bytes(4 * tokens)}: the largest logit, the sum of exponentials, and the label's logit, which lies on one rank.",
    )


def inside_or_between(*, layers: int = 4, ranks: int = 2, title: str = "") -> Picture:
    """Two ways to cut the same stack of layers: inside each matrix (tensor), and between layers (pipeline).

    Raises:
        ValueError: fewer than 2 ranks or more than 4, or layers that do not divide over them or are more than 8.
    """
    _between("ranks", ranks, 2, 4)
    _between("layers", layers, ranks, 8)
    if layers % ranks:
        raise ValueError(f"layers={layers} do not divide over ranks={ranks}: take a multiple.")
    title = title or "Cut inside each layer, or between layers?"
    figure, axis = _canvas(width=8.2, height=1.5 + 0.62 * layers, title=title)
    for layer in range(layers):
        y = layer * 1.0
        for rank in range(ranks):
            _matrix(axis, 3.0 / ranks * rank, y, 3.0 / ranks * 0.97, 0.62, rank, "")
        axis.text(-0.15, y + 0.31, f"layer {layer}", ha="right", va="center", fontsize=9)
        axis.text(3.15, y + 0.31, "2 all-reduces", ha="left", va="center", fontsize=8.5, color=SENT, weight="bold")
        stage = layer * ranks // layers
        _matrix(axis, 5.9, y, 3.0, 0.62, stage, f"rank {stage}")
        if layer + 1 < layers:
            border = (layer + 1) * ranks // layers != stage
            axis.annotate("", (1.5, y + 0.99), (1.5, y + 0.63), arrowprops={"arrowstyle": "->", "linewidth": 1})
            axis.annotate(
                "", (7.4, y + 0.99), (7.4, y + 0.63),
                arrowprops={"arrowstyle": "->", "linewidth": 3 if border else 1, "color": SENT if border else "black"},
            )  # fmt: skip
            if border:
                axis.text(7.6, y + 0.81, "1 send", ha="left", va="center", fontsize=8.5, color=SENT, weight="bold")
    for rank in range(ranks):
        x = 3.0 / ranks * (rank + 0.485)
        axis.text(x, layers - 0.3, f"rank {rank}", ha="center", va="bottom", fontsize=9)
    axis.text(1.5, layers + 0.12, "tensor: inside each matrix", ha="center", va="bottom", fontsize=10)
    axis.text(7.4, layers + 0.12, "pipeline: between layers", ha="center", va="bottom", fontsize=10)
    axis.text(
        1.5,
        -0.2,
        "all ranks at once, on the same tokens\n(sends: of the forward pass)",
        ha="center",
        va="top",
        fontsize=8.5,
    )
    axis.text(7.4, -0.2, "one after another; busy with different\nmicro-batches", ha="center", va="top", fontsize=8.5)
    axis.set(xlim=(-1.1, 9.3), ylim=(-0.95, layers + 0.6))
    return picture(
        figure,
        f"{title} Left, tensor parallelism: each of {layers} layers is cut over {ranks} ranks, and sends 2 all-reduces "
        f"in its forward pass. Right, pipeline parallelism: each rank holds {layers // ranks} whole layers, and sends its "
        f"result once to the next rank, {ranks - 1} time{'s' * (ranks > 2)} in all.",
    )


def _canvas(*, width: float, height: float, title: str) -> tuple[Any, Axes]:
    figure, (axis,) = new_figure(width=width, height=height)
    axis.grid(False)
    axis.set_axis_off()
    axis.set_title(title)
    return figure, axis


def _matrix(
    axis: Axes, x: float, y: float, width: float, space: float, rank: int | None, name: str,
    *, height: float = 0.0, lift: float = 0.0, ghost: bool = False,
) -> None:  # fmt: skip
    """A rectangle of `space` (or `height`) above y + lift, in the rank's look; grey where all ranks hold the same."""
    tall = height or space
    if ghost:
        axis.add_patch(_rectangle(x, y, width, tall, "none", edge="#888888", style=":"))
        return
    look = (WHOLE, "") if rank is None else (COLOURS[(4, 1, 2, 5)[rank % 4]], HATCHES[rank % 4])
    axis.add_patch(_rectangle(x, y + lift, width, tall, look[0], hatch=look[1]))
    if name:
        axis.text(x + width / 2, y + lift + tall / 2, name, ha="center", va="center", fontsize=9,
                  bbox={"facecolor": look[0] if rank is None else "white", "edgecolor": "none", "pad": 1.2})  # fmt: skip


def _rectangle(
    x: float, y: float, width: float, height: float, colour: str,
    *, hatch: str = "", edge: str = "white", style: str = "-", line: float = 0.8,
) -> Any:  # fmt: skip
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, hatch=hatch, edgecolor=edge, linestyle=style,
                     linewidth=line)  # fmt: skip


def _sub(rank: int) -> str:
    return "₀₁₂₃"[rank]


def _between(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: give a whole number from {least} to {most}.")
