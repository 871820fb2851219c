"""Lesson 1's pictures: memory over the time of a step, needs against cards, what the allocator holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, HATCHES, legend_below, new_figure, patch, picture, require, stacked_bars
from course_lib.units import GIB, MIB, nice_bytes

if TYPE_CHECKING:
    from course_lib.figures.style import Picture

PARTS = {  # a Breakdown's fields -> what the legend calls them, and their colours
    "weights": ("weights", COLOURS[0]),
    "gradients": ("gradients", COLOURS[1]),
    "optimizer": ("optimizer state", COLOURS[2]),
    "activations": ("activations", COLOURS[4]),
    "logits": ("logits", COLOURS[5]),
    "buffers": ("buffers and copies", "#999999"),
}


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
    require(len(curve) > 1, "allocation and one free of a recorded step (see memory_over_time)")
    figure, (axis,) = new_figure(height=3.9)
    times = [time / 1e9 for time, _ in curve]
    sizes = [size / MIB for _, size in curve]
    low = 0.0
    for i, (name, size) in enumerate(floors.items()):
        look = {"color": COLOURS[(0, 2)[i % 2]], "hatch": ("//", "..")[i % 2], "edgecolor": "white", "alpha": 0.55}
        axis.fill_between(times, low, low + size / MIB, step="post", label=name, **look)
        low += size / MIB
    above = [size >= low for size in sizes]
    label = "gradients, activations, temporaries"
    axis.fill_between(times, low, sizes, where=above, step="post", color=COLOURS[4], alpha=0.45, label=label)
    axis.step(times, sizes, where="post", color="black", linewidth=1.1)
    top = max(sizes)
    highest = times[sizes.index(top)]
    for name, (first, last) in phases.items():
        axis.axvline(first / 1e9, color="black", linestyle=":", linewidth=1)
        axis.text((first + last) / 2e9, top * 1.13, name, ha="center", va="top")
    axis.plot([highest], [top], marker="v", color=COLOURS[3], markersize=9)
    side = {"xytext": (-8, 0), "ha": "right"} if highest > times[-1] / 2 else {"xytext": (8, 0), "ha": "left"}
    axis.annotate(f"peak {top:,.0f} MiB", (highest, top), textcoords="offset points", va="center", **side)
    axis.set(xlabel="seconds", ylabel="MiB", title=title, ylim=(0, top * 1.16), xlim=(0, times[-1]))
    legend_below(figure, columns=3)
    always = ", ".join(f"{name} {nice_bytes(size)}" for name, size in floors.items())
    return picture(
        figure, f"{title}: memory over time; always there: {always}; peak {top:,.0f} MiB at {highest:.2f} s."
    )


def against_card(needs: Mapping[str, Any], *, card: int, card_name: str, title: str) -> Picture:
    """One stacked bar per need, and the card's memory as a line.

    A bar's parts are not all there at one time: the black mark is the peak, in the worst phase of the step.

    Args:
        needs: name -> Breakdown.
        card: bytes.

    Raises:
        ValueError: no needs.
    """
    require(needs, "estimate")
    figure, (axis,) = new_figure(height=1.7 + 0.46 * len(needs), grid="x")
    places = list(range(len(needs)))[::-1]
    parts = [
        (label, [getattr(need, part) / GIB for need in needs.values()], colour, hatch)
        for (part, (label, colour)), hatch in zip(PARTS.items(), HATCHES, strict=False)
    ]
    ends = stacked_bars(axis, places, parts)
    peaks = [need.peak / GIB for need in needs.values()]
    axis.plot(peaks, places, "|", color="black", markersize=19, markeredgewidth=3, label="peak")
    axis.axvline(card / GIB, color=COLOURS[3], linestyle="--", linewidth=2, label=card_name)
    axis.set_yticks(places, list(needs))
    axis.set(xlabel="GiB", title=title, xlim=(0, 1.06 * max(*ends, card / GIB)))
    legend_below(figure)
    peaks = "; ".join(f"{name}: peak {need.peak / GIB:.1f} GiB, {need.peak_phase}" for name, need in needs.items())
    return picture(figure, f"{title}, against {card_name} of {card / GIB:.1f} GiB: {peaks}.")


def reserved_and_allocated(moments: Sequence[Any], *, title: str, note: str) -> Picture:
    """Bytes that tensors have and bytes that the allocator holds, event by event.

    Args:
        moments: with ``allocated`` and ``reserved``, bytes.
        note: what the figure rests on (a simulation says so).

    Raises:
        ValueError: no moments.
    """
    require(moments, "replayed event")
    figure, (axis,) = new_figure()
    events = range(len(moments))
    reserved, allocated = ([getattr(moment, name) / MIB for moment in moments] for name in ("reserved", "allocated"))
    cached = {"color": COLOURS[1], "alpha": 0.4, "hatch": "//", "edgecolor": "white", "label": "cached, empty"}
    axis.fill_between(events, allocated, reserved, **cached)
    axis.fill_between(events, 0, allocated, color=COLOURS[4], alpha=0.6, label="allocated")
    axis.plot(events, reserved, color=COLOURS[3], linestyle="--", label="reserved")
    axis.plot(events, allocated, color=COLOURS[0])
    axis.set(xlabel="allocations and frees, in their order", ylabel="MiB", title=title)
    axis.set(ylim=(0, 1.08 * max(reserved)), xlim=(0, len(moments)))
    legend_below(figure, columns=3)
    axis.text(0.01, 0.98, note, transform=axis.transAxes, va="top", fontsize=8)
    most = f"at most {max(allocated):,.0f} MiB allocated, {max(reserved):,.0f} MiB reserved"
    return picture(figure, f"{title} ({note}): {most}.")


def segments(shown: Mapping[str, Sequence[Any]], *, title: str, note: str) -> Picture:
    """The allocator's segments, one row each: what is used, what is free.

    Args:
        shown: name of a state -> its segments, each with ``parts`` of ``bytes`` and ``id`` (None: free).

    Raises:
        ValueError: no segments.
    """
    rows = [(f"{name}, segment {i + 1}", group[i]) for name, group in shown.items() for i in range(len(group))]
    require(rows, "segment")
    figure, (axis,) = new_figure(height=1.4 + 0.4 * len(rows), grid="")
    looks = {"in use": (COLOURS[0], "", "white"), "free": ("white", "//", "#666666")}
    for place, (_, segment) in enumerate(reversed(rows)):
        left = 0.0
        for part in segment.parts:
            colour, hatch, edge = looks["free" if part.id is None else "in use"]
            axis.barh(place, part.bytes / MIB, 0.66, left=left, color=colour, hatch=hatch, edgecolor=edge)
            left += part.bytes / MIB
    axis.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    axis.set(xlabel="MiB within the segment", title=title)
    handles = [patch(*look) for look in looks.values()]
    figure.legend(handles, list(looks), frameon=False, ncols=2, loc="outside lower center", title=note)
    contents = "; ".join(
        f"{name}: "
        + ", ".join(f"{part.bytes / MIB:.0f} MiB {'free' if part.id is None else 'in use'}" for part in segment.parts)
        for name, segment in rows
    )
    return picture(figure, f"{title} ({note}): {contents}.")
