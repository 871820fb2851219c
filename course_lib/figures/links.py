"""Measured collectives by size: the points, their scatter, and the line of alpha and beta through them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.collectives.links import bus_factor
from course_lib.figures.style import COLOURS, LINES, MARKERS, new_figure, picture, require
from course_lib.units import nice_bytes

if TYPE_CHECKING:
    from course_lib.collectives.measuring import Curve, Fit
    from course_lib.figures.style import Picture


def bandwidth_curve(curve: Curve, fit: Fit, *, held_out: Sequence[int] = ()) -> Picture:
    """Left: seconds by payload, with the range over the repeats. Right: bus bandwidth. Both with the fitted curve.

    The region where latency is more than half of the time is hatched.

    Args:
        curve: of ``bench_all_reduce``.
        fit: of the curve, or of a part of it.
        held_out: payloads in bytes that the fit did not see; hollow markers.
    """
    points: list[Any] = list(curve)
    if len(points) < 2:
        raise ValueError("A curve needs at least two sizes to be drawn: give bench_all_reduce more.")
    title = f"all-reduce, {curve.ranks} ranks, {curve.stamp.get('backend', '')}".rstrip(", ")
    low, high = points[0].bytes / 1.6, points[-1].bytes * 1.6
    steps = [low * (high / low) ** (i / 99) for i in range(100)]
    figure, (left, right) = new_figure(8.2, 3.5, columns=2)
    factor = bus_factor("all_reduce", curve.ranks)
    left.plot(steps, [fit.predict(s) * 1e3 for s in steps], color=COLOURS[3], linestyle=LINES[1], label="fit")
    right.plot(steps, [factor * s / fit.predict(s) / 1e9 for s in steps], color=COLOURS[3], linestyle=LINES[1])
    for seen, name in ((True, "measured"), (False, "measured, not fitted")):
        chosen = [p for p in points if (p.bytes not in held_out) is seen]
        if not chosen:
            continue
        how = {"fmt": MARKERS[0 if seen else 1], "color": COLOURS[0], "markersize": 5, "capsize": 2, "linewidth": 1}
        how["markerfacecolor"] = COLOURS[0] if seen else "white"
        sizes = [p.bytes for p in chosen]
        below = [(p.seconds - p.fastest) * 1e3 for p in chosen]
        above = [(p.slowest - p.seconds) * 1e3 for p in chosen]
        left.errorbar(sizes, [p.seconds * 1e3 for p in chosen], yerr=[below, above], label=name, **how)
        bus = [[factor * p.bytes / t / 1e9 for t in (p.slowest, p.seconds, p.fastest)] for p in chosen]
        spread = [[b[1] - b[0] for b in bus], [b[2] - b[1] for b in bus]]
        right.errorbar(sizes, [b[1] for b in bus], yerr=spread, **how)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set(xlabel="payload (bytes)", xlim=(low, high))
        first_power, last_power = math.ceil(math.log2(low)), math.floor(math.log2(high))
        every = max(1, math.ceil((last_power - first_power) / 4))  # four or five labels fit beside each other
        ticks = [2.0**power for power in range(first_power, last_power + 1, every)]
        axis.set_xticks(ticks, [_short(tick) for tick in ticks])
        axis.minorticks_off()
        _regions(axis, fit.half_size, low, high)
    left.set(ylabel="time (ms)")
    if points[-1].seconds > 10 * points[0].seconds:
        left.set_yscale("log")
        left.minorticks_off()
    else:
        left.set_ylim(0, None)
    right.set(ylabel="bus bandwidth (GB/s)", ylim=(0, None))
    left.legend(frameon=False, loc="upper left", fontsize=8)
    figure.suptitle(title)
    first, last = points[0], points[-1]
    return picture(
        figure,
        f"{title}: {first.seconds * 1e3:.2f} ms at {nice_bytes(first.bytes)}, {last.seconds * 1e3:.2f} ms at "
        f"{nice_bytes(last.bytes)}, where the bus bandwidth is {factor * last.bytes / last.seconds / 1e9:.2f} GB/s; the fit is "
        f"{fit.alpha * 1e3:.3f} ms plus payload over {fit.bandwidth / 1e9:.2f} GB/s, latency-bound below "
        f"{nice_bytes(fit.half_size)}.",
    )


def _short(value: float) -> str:
    """``65536`` -> ``"64 KiB"``: sizes on an axis are powers of two."""
    return nice_bytes(value).replace(".00", "").replace("bytes", "B")


def _regions(axis: Any, half: float, low: float, high: float) -> None:
    """Hatch where latency rules, and write both regions' names above the axes."""
    edge = min(max(half, low), high)
    if edge > low:
        axis.axvspan(low, edge, facecolor="#EEEEEE", edgecolor="#CCCCCC", hatch="//", linewidth=0, zorder=0)
    for name, a, b in (("latency-bound", low, edge), ("bandwidth-bound", edge, high)):
        if b / a > (high / low) ** 0.25:  # room for the words
            axis.text((a * b) ** 0.5, 1.01, name, transform=axis.get_xaxis_transform(), ha="center", fontsize=8)


def seconds_by_size(sizes: Sequence[int], seconds: Mapping[str, Sequence[float]], *, title: str) -> Picture:
    """Logarithmic lines over the payload, one per way to do a collective.

    Args:
        sizes: payloads in bytes, ascending.
        seconds: way -> seconds at each of the sizes.
    """
    require(seconds, "way")
    figure, (axis,) = new_figure(height=3.4)
    for i, (name, times) in enumerate(seconds.items()):
        axis.plot(sizes, [1e3 * t for t in times], label=name, color=COLOURS[i], linestyle=LINES[i], linewidth=2)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sizes[:: max(1, len(sizes) // 5)]
    axis.set_xticks(ticks, [_short(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set(xlabel="payload (bytes)", ylabel="time (ms)", title=title)
    axis.legend(frameon=False)
    fastest = [min(seconds, key=lambda name: seconds[name][i]) for i in range(len(sizes))]
    runs = [(name, nice_bytes(sizes[i])) for i, name in enumerate(fastest) if not i or name != fastest[i - 1]]
    return picture(figure, f"{title}. Fastest: {', '.join(f'{name} from {size} on' for name, size in runs)}.")
