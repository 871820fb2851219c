"""Lesson 3's pictures: a collective before and after, and the ring, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, GROUP_COLOURS, LINES, MARKERS, box, new_figure, picture, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.figures.style import Picture

RANK_COLOURS = [*GROUP_COLOURS, "#777777"]
KINDS = ("broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")


def states(kind: str, ranks: int = 4) -> tuple[list[list[Any]], list[list[Any]]]:
    """What each rank's chunks hold before and after a collective; root is rank 0.

    A chunk is (ranks summed up in it, which piece it is), or None where nothing lies.
    """
    everyone = frozenset(range(ranks))
    own = [[(frozenset({r}), c) for c in range(ranks)] for r in range(ranks)]
    summed = [(everyone, c) for c in range(ranks)]
    nothing: list[Any] = [None] * ranks
    one_piece = [[(frozenset({r}), c) if c == r else None for c in range(ranks)] for r in range(ranks)]
    gathered = [(frozenset({c}), c) for c in range(ranks)]
    root_only = [own[0]] + [nothing] * (ranks - 1)
    table = {
        "broadcast": (root_only, [own[0]] * ranks),
        "reduce": (own, [summed] + [nothing] * (ranks - 1)),
        "all_reduce": (own, [summed] * ranks),
        "reduce_scatter": (own, [[(everyone, c) if c == r else None for c in range(ranks)] for r in range(ranks)]),
        "all_gather": (one_piece, [gathered] * ranks),
        "all_to_all": (own, [[(frozenset({c}), r) for c in range(ranks)] for r in range(ranks)]),
        "gather": (one_piece, [gathered] + [nothing] * (ranks - 1)),
        "scatter": (root_only, [[own[0][r] if c == r else None for c in range(ranks)] for r in range(ranks)]),
    }
    if kind not in table:
        raise ValueError(f"kind={kind!r}: there are pictures of {', '.join(KINDS)}.")
    return table[kind]


def before_and_after(kinds: Sequence[str], ranks: int = 4) -> Picture:
    """For each collective, what the ranks hold before and after: "a1" is rank 0's piece 1, "bc0" the sum of rank 1's and
    rank 2's piece 0, "Σ3" the sum of all ranks' piece 3.
    """
    require(kinds, "collective")
    figure, axes = new_figure(height=0.5 + 1.75 * len(kinds), rows=len(kinds), columns=2, grid="")
    summary = []
    for i, kind in enumerate(kinds):
        before, after = states(kind, ranks)
        for axis, state, when in ((axes[2 * i], before, "before"), (axes[2 * i + 1], after, "after")):
            _grid(axis, state)
            axis.set_title(f"{kind}, {when}", fontsize=10)
        summary.append(f"{kind}: rank 0 has {_in_words(before[0])} before and {_in_words(after[0])} after")
    return picture(
        figure, f"Pieces of a tensor on {ranks} ranks before and after each collective. {'; '.join(summary)}."
    )


def _label(chunk: Any) -> str:
    if chunk is None:
        return ""
    ranks, piece = chunk
    if len(ranks) > 3:
        return f"Σ{piece}"
    return "".join(chr(ord("a") + r) for r in sorted(ranks)) + str(piece)


def _in_words(row: Sequence[Any]) -> str:
    return ", ".join(filter(None, map(_label, row))) or "nothing"


def _grid(axis: Axes, state: Sequence[Sequence[Any]]) -> None:
    """Ranks as rows, pieces as columns."""
    ranks = len(state)
    axis.spines[["left", "bottom"]].set_visible(False)
    for r, row in enumerate(state):
        for c, chunk in enumerate(row):
            y = ranks - 1 - r
            if chunk is None:
                box(axis, c, y, 0.92, 0.8, "white", edgecolor="#CCCCCC", linewidth=0.8)
                continue
            width = 0.92 / len(chunk[0])
            for k, rank in enumerate(sorted(chunk[0])):  # a stripe per contributor
                box(axis, c + k * width, y, width, 0.8, RANK_COLOURS[rank % 8], linewidth=0.8)
            ground = (
                {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.2} if len(chunk[0]) > 1 else None
            )
            axis.text(c + 0.46, y + 0.4, _label(chunk), ha="center", va="center", fontsize=9, bbox=ground)
    axis.set(xlim=(-0.1, len(state[0])), ylim=(-0.1, ranks), xticks=[])
    axis.set_yticks([ranks - 1 - r + 0.4 for r in range(ranks)], [f"rank {r}" for r in range(ranks)])
    axis.tick_params(length=0)


def ring_state(ranks: int, step: int) -> tuple[list[list[Any]], list[tuple[int, int, int]]]:
    """The ring all-reduce after `step` of its 2(n-1) steps: every rank's chunks, and the (sender, chunk, receiver) of the
    step just done. It follows lesson 3's `ring`, where rank r ends the first half with chunk r.
    """
    last = 2 * (ranks - 1)
    if ranks < 2 or not 0 <= step <= last:
        raise ValueError(f"step={step} of {ranks} ranks: a ring has at least 2 ranks and steps 0 to 2(n-1).")
    held = [[frozenset({r}) for _ in range(ranks)] for r in range(ranks)]
    sent: list[tuple[int, int, int]] = []
    for now in range(step):
        adding = now < ranks - 1
        offset = now + 1 if adding else now - (ranks - 1)
        sent = [(r, (r - offset) % ranks, (r + 1) % ranks) for r in range(ranks)]
        moving = [held[sender][chunk] for sender, chunk, _ in sent]
        for (_, chunk, receiver), content in zip(sent, moving, strict=True):
            held[receiver][chunk] = held[receiver][chunk] | content if adding else content
    return [[(content, c) for c, content in enumerate(row)] for row in held], sent


def ring_step(ranks: int, step: int) -> Picture:
    """One step of the ring: the chunks, and arrows for what was just sent. Raises ValueError as `ring_state`."""
    state, sent = ring_state(ranks, step)
    figure, (axis,) = new_figure(height=0.9 + 0.62 * ranks, grid="")
    _grid(axis, state)
    for sender, chunk, receiver in sent:
        start, end = ranks - 1 - sender + 0.4, ranks - 1 - receiver + 0.4
        look = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", xy=(chunk + 0.78, end), xytext=(chunk + 0.78, start), arrowprops=look)  # beside the labels
        axis.plot(chunk + 0.78, start, ".", color="black")
    half = "reduce-scatter, add and pass on" if step < ranks else "all-gather, copy and pass on"
    title = f"step {step} of {2 * (ranks - 1)}: {half if step else 'before the first step'}"
    axis.set_title(title, fontsize=11)
    moves = ", ".join(f"rank {s} sent chunk {c} to rank {r}" for s, c, r in sent) or "nothing was sent yet"
    return picture(figure, f"Ring all-reduce on {ranks} ranks, {title}: {moves}; {_finished(state)}.")


def _finished(state: Sequence[Sequence[Any]]) -> str:
    whole = sum(len(content) == len(state) for row in state for content, _ in row)
    return f"{whole} of {len(state) ** 2} chunks hold the whole sum"


def by_ranks(
    measured: Mapping[str, Mapping[int, float]],
    formulas: Mapping[str, Mapping[int, float]],
    *,
    unit: str,
    title: str,
) -> Picture:
    """What was measured as markers, what a formula says as lines, over the number of ranks."""
    require(any(measured.values()), "algorithm, with a number for each number of ranks")
    figure, (axis,) = new_figure()
    for i, (name, points) in enumerate(formulas.items()):
        axis.plot(list(points), list(points.values()), label=f"{name}, formula", color=COLOURS[i], linestyle=LINES[i])
    for i, (name, points) in enumerate(measured.items()):
        look = {"color": COLOURS[i], "linestyle": "none", "marker": MARKERS[i], "markersize": 9, "markeredgewidth": 2}
        axis.plot(list(points), list(points.values()), label=f"{name}, measured", markerfacecolor="white", **look)
    axis.set(xlabel="ranks", ylabel=unit, title=title, ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    curves = [(name, list(points.items())) for name, points in measured.items()]
    ends = "; ".join(
        f"{name} from {p[0][1]:.3g} at {p[0][0]} ranks to {p[-1][1]:.3g} at {p[-1][0]}" for name, p in curves
    )
    return picture(figure, f"{title}, {unit} by number of ranks: {ends}.")


def seconds_by_link(seconds: Mapping[str, float], *, title: str) -> Picture:
    """Dots on a logarithmic axis, one per link."""
    require(seconds, "link")
    figure, (axis,) = new_figure(height=1.2 + 0.3 * len(seconds), grid="x")
    names = list(seconds)[::-1]
    values = [1e3 * seconds[name] for name in names]
    axis.hlines(range(len(names)), min(values) / 2, values, color="#CCCCCC", linewidth=1, zorder=0)
    axis.plot(values, range(len(names)), MARKERS[0], color=COLOURS[0], markersize=8)
    for place, value in enumerate(values):
        axis.text(value * 1.25, place, f"{value:,.3g} ms", va="center", fontsize=9)
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="milliseconds (logarithmic)", title=title, xscale="log", xlim=(min(values) / 2, max(values) * 6))
    return picture(figure, f"{title}: " + "; ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in seconds) + ".")
