"""Collectives by size: measured, with the line of alpha and beta through them, and by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import COLOURS, LINES, MARKERS, new_figure, picture, require
from course_lib.units import nice_bytes

if TYPE_CHECKING:
    from course_lib.collectives.measuring import Curve, Fit
    from course_lib.figures.style import Picture


def fitted_curve(curve: Curve, fit: Fit, *, held_out: Sequence[int] = ()) -> Picture:
    """Seconds by payload, with the range over the repeats, and the fitted line.

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
    figure, (axis,) = new_figure(height=3.6)
    axis.plot(steps, [fit.predict(s) * 1e3 for s in steps], color=COLOURS[3], linestyle=LINES[1], label="fit")
    for seen, name in ((True, "measured: median, fastest to slowest"), (False, "the same, left out of the fit")):
        chosen = [p for p in points if (p.bytes not in held_out) is seen]
        if not chosen:
            continue
        how = {"fmt": MARKERS[0 if seen else 1], "color": COLOURS[0], "markersize": 5, "capsize": 2, "linewidth": 1}
        how["markerfacecolor"] = COLOURS[0] if seen else "white"
        below = [(p.seconds - p.fastest) * 1e3 for p in chosen]
        above = [(p.slowest - p.seconds) * 1e3 for p in chosen]
        axis.errorbar(
            [p.bytes for p in chosen], [p.seconds * 1e3 for p in chosen], yerr=[below, above], label=name, **how
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel="payload (bytes)", ylabel="time (ms)", xlim=(low, high))
    axis.set_title(title, pad=18)
    _ticks(axis, [2**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)])
    _regions(axis, fit.half_size, low, high)
    axis.legend(frameon=False, loc="upper left", fontsize=8)
    first, last = points[0], points[-1]
    return picture(
        figure,
        f"{title}: {first.seconds * 1e3:.2f} ms at {nice_bytes(first.bytes)}, {last.seconds * 1e3:.2f} ms at "
        f"{nice_bytes(last.bytes)}; the fit is {fit.alpha * 1e3:.3f} ms plus payload over {fit.bandwidth / 1e9:.2f} "
        f"GB/s, latency-bound below {nice_bytes(fit.half_size)}.",
    )


def _ticks(axis: Any, sizes: Sequence[int]) -> None:
    """Label four or five of the sizes, as powers of two: ``64 KiB``, not ``65536``."""
    ticks = sizes[:: max(1, math.ceil(len(sizes) / 5))]
    axis.set_xticks(ticks, [nice_bytes(tick).replace(".00", "").replace("bytes", "B") for tick in ticks])
    axis.minorticks_off()


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
    _ticks(axis, sizes)
    axis.set(xlabel="payload (bytes)", ylabel="time (ms)", title=title)
    axis.legend(frameon=False)
    fastest = [min(seconds, key=lambda name: seconds[name][i]) for i in range(len(sizes))]
    runs = [(name, nice_bytes(sizes[i])) for i, name in enumerate(fastest) if not i or name != fastest[i - 1]]
    return picture(figure, f"{title}. Fastest: {', '.join(f'{name} from {size} on' for name, size in runs)}.")
