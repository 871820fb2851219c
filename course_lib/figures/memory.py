"""Lesson 1's pictures: memory over the time of a step, needs against cards, what the allocator holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, HATCHES, new_figure, nice_bytes, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from course_lib.figures.style import Picture

GIB, MIB = 2**30, 2**20
PARTS = {  # a Breakdown's fields -> what the legend calls them
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers and copies",
}
PART_COLOURS = (COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[4], COLOURS[5], "#999999")


def memory_over_time(
    curve: Sequence[tuple[int, int]],
    *,
    floors: Mapping[str, int],
    phases: Mapping[str, tuple[int, int]],
    title: str = "One training step",
) -> Picture:
    """Memory against time, with what lies there all the time as bands below, and the phases of the step marked.

    Args:
        curve: (nanoseconds, bytes) after each allocation or free.
        floors: name -> bytes that stay, the lowest first.
        phases: name -> (first, last) nanosecond.

    Raises:
        ValueError: no curve.
    """
    if len(curve) < 2:
        raise ValueError("There is nothing to draw: give the curve of a recorded step (see memory_over_time).")
    figure, (axis,) = new_figure(height=3.9)
    times = [at / 1e9 for at, _ in curve]
    sizes = [size / MIB for _, size in curve]
    low = 0.0
    for i, (name, size) in enumerate(floors.items()):
        axis.fill_between(
            times, low, low + size / MIB, step="post", color=PART_COLOURS[(0, 2)[i % 2]], hatch=("//", "..")[i % 2],
            alpha=0.55, edgecolor="white", label=name,
        )  # fmt: skip
        low += size / MIB
    axis.fill_between(times, low, sizes, where=[size >= low for size in sizes], step="post", color=COLOURS[4], alpha=0.45,
                      label="gradients, activations, temporaries")  # fmt: skip
    axis.step(times, sizes, where="post", color="black", linewidth=1.1)
    top = max(sizes)
    highest = times[sizes.index(top)]
    for name, (first, last) in phases.items():
        axis.axvline(first / 1e9, color="black", linestyle=":", linewidth=1)
        axis.text((first + last) / 2e9, top * 1.13, name, ha="center", va="top")
    axis.plot([highest], [top], marker="v", color=COLOURS[3], markersize=9)
    right = highest > times[-1] / 2
    axis.annotate(
        f"peak {top:,.0f} MiB", (highest, top), xytext=(-8 if right else 8, 0), textcoords="offset points",
        ha="right" if right else "left", va="center",
    )  # fmt: skip
    axis.set(xlabel="seconds", ylabel="MiB", title=title, ylim=(0, top * 1.16), xlim=(0, times[-1]))
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    told = ", ".join(f"{name} {nice_bytes(size)}" for name, size in floors.items())
    return picture(figure, f"{title}: memory over time; always there: {told}; peak {top:,.0f} MiB at {highest:.2f} s.")


def against_card(needs: Mapping[str, Any], *, card: int, card_name: str, title: str) -> Picture:
    """One stacked bar a need, and the card's memory as a line; see :func:`draw_against_card`."""
    figure, alt = draw_against_card(needs, card=card, card_name=card_name, title=title)
    return picture(figure, alt)


def draw_against_card(needs: Mapping[str, Any], *, card: int, card_name: str, title: str) -> tuple[Figure, str]:
    """The figure and its text.

    A bar's parts are not all there at one time: the black mark is the peak, at its worst moment.

    Args:
        needs: name -> Breakdown. card: bytes.

    Raises:
        ValueError: no needs.
    """
    if not needs:
        raise ValueError("There is nothing to draw: give at least one estimate.")
    figure, (axis,) = new_figure(height=1.7 + 0.46 * len(needs))
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    places = list(range(len(needs)))[::-1]
    left = [0.0] * len(needs)
    for (part, label), colour, hatch in zip(PARTS.items(), PART_COLOURS, HATCHES, strict=False):
        sizes = [getattr(need, part) / GIB for need in needs.values()]
        axis.barh(places, sizes, 0.6, left=left, label=label, color=colour, hatch=hatch, edgecolor="white")
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    peaks = [need.peak / GIB for need in needs.values()]
    axis.plot(peaks, places, "|", color="black", markersize=19, markeredgewidth=3, label="peak")
    axis.axvline(card / GIB, color=COLOURS[3], linestyle="--", linewidth=2, label=card_name)
    axis.set_yticks(places, list(needs))
    axis.set(xlabel="GiB", title=title, xlim=(0, 1.06 * max(*left, card / GIB)))
    figure.legend(frameon=False, ncols=4, loc="outside lower center")
    told = "; ".join(f"{name}: peak {need.peak / GIB:.1f} GiB, {need.moment}" for name, need in needs.items())
    return figure, f"{title}, against {card_name} of {card / GIB:.1f} GiB: {told}."


def reserved_and_allocated(moments: Sequence[Any], *, title: str, note: str) -> Picture:
    """Bytes that tensors have and bytes that the allocator holds, event by event.

    Args:
        moments: with ``allocated`` and ``reserved``, bytes.
        note: what the figure rests on (a simulation says so).

    Raises:
        ValueError: no moments.
    """
    if not moments:
        raise ValueError("There is nothing to draw: replay at least one event.")
    figure, (axis,) = new_figure()
    events = range(len(moments))
    reserved, allocated = ([getattr(m, name) / MIB for m in moments] for name in ("reserved", "allocated"))
    axis.fill_between(
        events, allocated, reserved, color=COLOURS[1], alpha=0.4, hatch="//", edgecolor="white", label="cached, empty"
    )
    axis.fill_between(events, 0, allocated, color=COLOURS[4], alpha=0.6, label="allocated")
    axis.plot(events, reserved, color=COLOURS[3], linestyle="--", label="reserved")
    axis.plot(events, allocated, color=COLOURS[0])
    axis.set(
        xlabel="allocations and frees, in their order",
        ylabel="MiB",
        title=title,
        ylim=(0, 1.08 * max(reserved)),
        xlim=(0, len(moments)),
    )
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    axis.text(0.01, 0.98, note, transform=axis.transAxes, va="top", fontsize=8)
    return picture(
        figure, f"{title} ({note}): at most {max(allocated):,.0f} MiB allocated, {max(reserved):,.0f} MiB reserved."
    )


def segments(shown: Mapping[str, Sequence[Any]], *, title: str, note: str) -> Picture:
    """The allocator's segments, one row a segment: what is used, what is free.

    Args:
        shown: name of a state -> its segments, each with ``parts`` of ``bytes`` and ``id`` (None: free).

    Raises:
        ValueError: no segments.
    """
    from matplotlib.patches import Patch

    rows = [(name, i, segment) for name, group in shown.items() for i, segment in enumerate(group)]
    if not rows:
        raise ValueError("There is nothing to draw: give at least one segment.")
    figure, (axis,) = new_figure(height=1.4 + 0.4 * len(rows))
    axis.grid(False)
    for place, (_, _, segment) in enumerate(reversed(rows)):
        left = 0.0
        for part in segment.parts:
            free = part.id is None
            axis.barh(place, part.bytes / MIB, 0.66, left=left, color="white" if free else COLOURS[0],
                      hatch="//" if free else "", edgecolor="#666666" if free else "white")  # fmt: skip
            left += part.bytes / MIB
    axis.set_yticks(range(len(rows)), [f"{name}, segment {i + 1}" for name, i, _ in reversed(rows)])
    axis.set(xlabel="MiB within the segment", title=title)
    used, free = (
        Patch(facecolor=COLOURS[0], label="in use"),
        Patch(facecolor="white", hatch="//", edgecolor="#666666", label="free"),
    )
    figure.legend(handles=[used, free], frameon=False, ncols=2, loc="outside lower center", title=note)
    told = "; ".join(
        f"{name}, segment {i + 1}: "
        + ", ".join(f"{part.bytes / MIB:.0f} MiB {'free' if part.id is None else 'in use'}" for part in segment.parts)
        for name, i, segment in rows
    )
    return picture(figure, f"{title} ({note}): {told}.")
