"""Pictures of memory: a step over time, needs against cards, what the allocator holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from course_lib.figures.style import (
    COLOURS,
    ON_WHITE,
    legend_below,
    new_figure,
    patch,
    picture,
    require,
    stacked_bars,
)
from course_lib.units import GIB, MIB, nice_bytes

if TYPE_CHECKING:
    from course_lib.figures.style import Picture
    from course_lib.memory import Breakdown
    from course_lib.memory.timeline import Timeline
    from course_lib.observe.snapshots import Snapshot

LOOKS = {  # category of memory -> colour, hatch
    "weights": (COLOURS[0], ""),
    "optimizer state": (COLOURS[2], ".."),
    "gradients": (COLOURS[1], "//"),
    "activations": (COLOURS[4], "\\\\"),
    "logits and loss": (COLOURS[5], "xx"),
    "autocast's copies": ("#BBBBBB", ""),
    "temporaries": ("#666666", ""),
}
OTHERS = [
    (COLOURS[3], "||"),
    ("#F0E442", "++"),
    ("#E8E8E8", "\\\\"),
    ("#8B5A2B", ""),
    ("black", "//"),
]  # other parts, in turn
REST = "margin, CUDA's context"  # between the peak and what a card must have


def step_memory(timeline: Timeline, *, title: str) -> Picture:
    """One training step, stacked by category, with its phases and its worst moment marked."""
    figure, (axis,) = new_figure(height=4.0)
    places, peak = np.arange(len(timeline.at_work)), timeline.peak
    unit, word = (GIB, "GiB") if peak > 8 * GIB else (MIB, "MiB")
    low = np.zeros(len(places))
    for name, (colour, hatch) in LOOKS.items():
        high = low + timeline.parts[name] / unit
        look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        axis.fill_between(places, low, high, step="post", label=name if timeline.parts[name].any() else None, **look)
        low = high
    axis.step(places, low, where="post", color="black", linewidth=0.8)
    top, worst = peak / unit, timeline.worst
    for name, first, last in timeline.phases:
        axis.axvline(first, color="black", linestyle=":", linewidth=1)
        narrow = last - first < len(places) / 8
        place, side = (last, "right") if narrow else ((first + last) / 2, "center")
        axis.text(place, 1.24 * top, name, va="top", ha=side, bbox=ON_WHITE)
    where = {"block": "in a block", "loss": "in the loss", "embedding": "at the embedding's gradient"}
    moment = where.get(timeline.at_work[worst], "in the optimizer's step")
    axis.plot([worst], [1.035 * top], marker="v", color="black", markersize=8)
    left = worst > len(places) / 2
    beside = {"textcoords": "offset points", "xytext": (-9 if left else 9, 2), "ha": "right" if left else "left"}
    words = f"worst moment: {top:,.1f} {word}, {moment}"
    axis.annotate(words, (worst, 1.035 * top), weight="bold", bbox=ON_WHITE, **beside)
    axis.set(xlabel="operations of one step, in order (those outside the blocks drawn wider)", ylabel=word, title=title)
    axis.set(ylim=(0, 1.26 * top), xlim=(0, places[-1]), xticks=[])
    legend_below(figure, columns=3)
    parts = ", ".join(f"{name} {nice_bytes(size)}" for name, size in timeline.at_peak.items() if size)
    return picture(figure, f"{title}: worst moment {top:,.1f} {word}, {moment}, made of {parts}.")


def against_cards(needs: Mapping[str, Breakdown], *, cards: Mapping[str, int], title: str) -> Picture:
    """What the worst moment of each need is made of, as one bar, and each card's memory as a line.

    The empty box at a bar's end is what PyTorch cannot use: the allocator's margin and CUDA's context. A bar fits a card if
    the box, too, ends left of its line.

    Args:
        cards: name -> bytes.
    """
    rows = {name: need.at_peak | {REST: need.device - need.peak} for name, need in needs.items()}
    return stacked_against_cards(rows, cards=cards, title=title)


def stacked_against_cards(
    rows: Mapping[str, Mapping[str, int]],
    *,
    cards: Mapping[str, int],
    title: str,
) -> Picture:
    """A bar for each row, stacked from its parts in bytes, and the cards' memory as lines.

    Args:
        rows: name -> part -> bytes. Parts that bear a name of LOOKS look as they do everywhere.
        cards: name -> bytes.
    """
    require(rows, "bar")
    require(cards, "card")
    figure, (axis,) = new_figure(height=1.9 + 0.46 * len(rows), grid="x")
    places = list(range(len(rows)))[::-1]
    there = dict.fromkeys(name for parts in rows.values() for name, size in parts.items() if size)
    others = [name for name in there if name not in LOOKS and name != REST]
    looks = LOOKS | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)} | {REST: ("white", "")}
    names = [name for name in looks if name in there]
    stacked = [(name, [parts.get(name, 0) / GIB for parts in rows.values()], *looks[name]) for name in names]
    ends = stacked_bars(axis, places, stacked)
    if REST in names:
        for bar in axis.containers[names.index(REST)]:
            bar.set_edgecolor("black")
    totals = [sum(parts.values()) for parts in rows.values()]
    for place, total in zip(places, totals, strict=True):
        fitting = [name for name, size in cards.items() if total <= size]
        no = "fits none" if len(cards) > 1 else "does not fit"
        verdict = f"fits {min(fitting, key=cards.__getitem__)}" if fitting else no
        words = f" {total / GIB:,.1f}  {verdict}"
        axis.text(1.0, place, words, transform=axis.get_yaxis_transform(), va="center", fontsize=9)
    for name, card in cards.items():
        axis.axvline(card / GIB, color=COLOURS[3], linestyle="--", linewidth=2, zorder=3)
        axis.text(card / GIB, len(rows) - 0.45, name, color=COLOURS[3], weight="bold", ha="center", va="bottom")
    axis.set_yticks(places, list(rows))
    axis.set(xlabel="GiB", xlim=(0, 1.05 * max(*ends, *(card / GIB for card in cards.values()))))
    axis.set_ylim(-0.6, len(rows) - 0.5)
    axis.set_title(title, pad=22)
    legend_below(figure, columns=3)
    told = "; ".join(
        f"{name}: {nice_bytes(total)} ("
        + ", ".join(f"{part} {nice_bytes(size)}" for part, size in parts.items() if size) + ")"
        for (name, parts), total in zip(rows.items(), totals, strict=True)
    )  # fmt: skip
    lines = ", ".join(name if "GiB" in name else f"{name} of {nice_bytes(card)}" for name, card in cards.items())
    return picture(figure, f"{title}, against {lines}. {told}.")


def allocated_and_reserved(snapshot: Snapshot, *, title: str, note: str) -> Picture:
    """Bytes that tensors ask for and bytes that the allocator holds, event by event of a memory snapshot.

    Args:
        note: what the figure rests on; an emulation says so.
    """
    figure, (axis,) = new_figure()
    reserved, allocated = snapshot.reserved / MIB, snapshot.allocated / MIB
    events = np.arange(len(allocated))
    cached = {"color": COLOURS[1], "alpha": 0.4, "hatch": "//", "edgecolor": "white", "label": "reserved, not in use"}
    axis.fill_between(events, allocated, reserved, step="post", **cached)
    axis.fill_between(events, 0, allocated, step="post", color=COLOURS[4], alpha=0.6, label="allocated to tensors")
    axis.step(events, reserved, where="post", color=COLOURS[3], linestyle="--", label="reserved")
    axis.step(events, allocated, where="post", color=COLOURS[0])
    axis.set(xlabel="allocations and frees, in order", ylabel="MiB", title=title)
    axis.set(ylim=(0, 1.12 * reserved.max()), xlim=(0, len(events)))
    legend_below(figure, columns=3)
    axis.text(0.01, 0.98, note, transform=axis.transAxes, va="top", fontsize=9)
    most = f"at most {allocated.max():,.0f} MiB allocated, {reserved.max():,.0f} MiB reserved"
    return picture(figure, f"{title} ({note}): {most}.")


def segments(shown: Mapping[str, Sequence[Any]], *, title: str, note: str) -> Picture:
    """The allocator's segments, one row each: what is used, what is free.

    Args:
        shown: name of a state -> its segments, each with ``parts`` of ``bytes`` and ``id`` (None: free).
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
