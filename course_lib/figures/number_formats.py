"""What a number format can hold: gradients against fp16's range, an 8-bit state, NF4's levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from course_lib.figures.style import (
    COLOURS,
    HATCHES,
    LINES,
    legend_below,
    new_figure,
    picture,
    require,
)

if TYPE_CHECKING:
    from course_lib.figures.style import Picture

FP16_SMALLEST, FP16_NORMAL, FP16_LARGEST = -24, -14, 16  # powers of two
LOWEST = -45  # where the picture begins


def gradient_window(gradients: Mapping[str, Any], *, title: str = "What fp16 can hold") -> Picture:
    """Histograms of the exponents of numbers that are not 0, against fp16's range.

    Args:
        gradients: name -> array of any shape.
    """
    import numpy as np

    require(gradients, "array of gradients")
    figure, (axis,) = new_figure()
    lost = []
    edges = np.arange(LOWEST, 21)
    for i, (name, values) in enumerate(gradients.items()):
        sizes = np.abs(np.asarray(values, dtype=np.float64).ravel())
        exponents = np.log2(sizes[sizes > 0])
        if not len(exponents):
            raise ValueError(f"{name!r} holds zeros alone: there is no exponent to draw.")
        lost.append(f"{name}: {100 * np.mean(exponents < FP16_SMALLEST - 1):.1f} % below fp16's smallest number")
        weights = np.full(len(exponents), 100 / len(exponents))
        exponents = np.clip(exponents, LOWEST, None)
        filled = {"histtype": "stepfilled", "alpha": 0.35, "hatch": HATCHES[i + 1]}
        outline = {"histtype": "step", "linestyle": LINES[i], "linewidth": 1.8, "label": name}
        for look in (filled, outline):
            axis.hist(exponents, edges, weights=weights, color=COLOURS[i], **look)
    axis.axvspan(LOWEST, FP16_SMALLEST - 1, color="#BBBBBB", alpha=0.5, zorder=0)
    top = axis.get_ylim()[1] * 1.18  # room for the words
    axis.set_ylim(0, top)
    axis.text((LOWEST + FP16_SMALLEST - 1) / 2, top * 0.93, "becomes 0", ha="center")
    axis.axvline(FP16_NORMAL, color="black", linestyle=":", linewidth=1)
    axis.axvline(FP16_LARGEST, color="black", linewidth=1.5)
    axis.text(FP16_NORMAL + 0.4, top * 0.93, "full precision", ha="left")
    axis.text((FP16_SMALLEST - 1 + FP16_NORMAL) / 2, top * 0.93, "fewer digits", ha="center")
    axis.text(FP16_LARGEST + 0.3, top * 0.8, "inf", ha="left")
    axis.set(xlabel="exponent: log2 of the size", ylabel="share of the numbers (%)", title=title, xlim=(LOWEST, 20))
    axis.legend(frameon=False, loc="center left")
    return picture(figure, f"{title}: {'; '.join(lost)}.")


def blockwise_state(values: Any, restored: Mapping[str, Any], *, block: int, title: str) -> Picture:
    """A stretch of an optimizer state with the scale of each block, and what each 8-bit form restores of it.

    Args:
        values: array (n,), none below 0.
        restored: name -> array (n,) after 8 bits and back.
        block: numbers that share a scale.
    """
    import numpy as np

    values = np.asarray(values, dtype=np.float64)
    figure, axes = new_figure(height=0.4 + 1.2 * (1 + len(restored)), rows=1 + len(restored))
    index = np.arange(len(values))
    scales = np.repeat([values[i : i + block].max() for i in range(0, len(values), block)], block)[: len(values)]
    small = values[values > 0].min() / 3
    axes[0].plot(index, np.maximum(values, small), ".", color=COLOURS[0], markersize=2.5)
    axes[0].step(index, scales, color=COLOURS[3], where="post", label=f"largest of each {block}")
    axes[0].axhline(values.max(), color="black", linestyle="--", label="largest of all")
    axes[0].set(title=title, ylabel="fp32")
    legend_below(figure, columns=2)
    lost = []
    for axis, (name, back) in zip(axes[1:], restored.items(), strict=True):
        back = np.asarray(back, dtype=np.float64)
        if back.shape != values.shape:
            raise ValueError(
                f"{name!r} has the shape {back.shape}, and the state has {values.shape}: restore it first."
            )
        gone = back <= 0
        axis.plot(index[~gone], np.maximum(back[~gone], small), ".", color=COLOURS[0], markersize=2.5)
        axis.plot(index[gone], np.full(gone.sum(), small), "x", color=COLOURS[3], markersize=3.5)
        axis.set(ylabel=name)
        lost.append(f"{name}: {100 * gone.mean():.1f} % became 0")
    for axis in axes:
        axis.set_yscale("log")
        axis.set_ylim(small / 2, values.max() * 3)
        axis.tick_params(axis="x", labelbottom=axis is axes[-1])
    axes[-1].set_xlabel("place in the state; a cross at the bottom is a number that became 0")
    return picture(figure, f"{title}, by place, and restored from 8 bits: {'; '.join(lost)}.")


def four_bit_levels(normalised: Any, levels: Mapping[str, Any]) -> Picture:
    """The histogram of weights divided by their block's largest, and the levels that each 4-bit form offers them.

    Args:
        normalised: array of numbers from -1 to 1.
        levels: name -> 16 levels.
    """
    import numpy as np

    title = "Sixteen levels for a weight"
    figure, (axis,) = new_figure()
    axis.hist(np.asarray(normalised).ravel(), 120, range=(-1, 1), density=True, color=COLOURS[4], label="weights")
    top = axis.get_ylim()[1]
    for i, (name, places) in enumerate(levels.items()):
        low = -top * 0.13 * (i + 1)
        axis.vlines(places, low, low + top * 0.1, color=COLOURS[(0, 3)[i % 2]], linewidth=2.2)
        axis.text(1.04, low + top * 0.02, name)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(xlabel="weight / largest of its block of 64", ylabel="density", title=title, xlim=(-1.02, 1.2))
    axis.set_yticks([tick for tick in axis.get_yticks() if 0 <= tick <= top])
    rest = "; ".join(f"{name} has levels {', '.join(f'{x:.2f}' for x in places)}" for name, places in levels.items())
    return picture(figure, f"{title}: weights pile up near 0; {rest}.")
