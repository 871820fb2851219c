"""One look for every figure of the course, and pictures that carry their own description."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette, ordered so that neighbours also differ in lightness when printed grey
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "x"]
LINES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))]
HATCHES = ["", "//", "..", "xx", "\\\\", "++", "||"]
GROUP_COLOURS = [COLOURS[4], COLOURS[1], COLOURS[2], COLOURS[5], COLOURS[0], COLOURS[3], "#BBBBBB"]
"""Light ones first, for boxes with text in them: ranks, groups."""
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1.3}
"""The box behind a text that stands on a colour: ``axis.text(..., bbox=ON_WHITE)``."""
SCALE = 1.15
"""A figure of 7.5 inches fills the site's column, 828 pixels of 1/96 inch."""
PIXELS = 2
"""Pixels of a PNG for each one on the page, so that it stays sharp on a dense screen."""
SVG_BYTES = 32 * 1024
"""A larger drawing, of many points, becomes a PNG where that is smaller."""
FONTS = "font-family:'DejaVu Sans',Verdana,sans-serif"  # the first is the one that Matplotlib measures with


def in_turn(forms: Sequence[Any], i: int) -> Any:
    """The line, marker or hatch of the ``i``-th series: where its colour comes again, the form is another one."""
    return forms[(i + i // 7) % 7]


def line_style(i: int) -> dict[str, Any]:
    """Colour, line and hollow marker of the ``i``-th series, for ``axis.plot``."""
    return {
        "color": COLOURS[i % 7],
        "linestyle": in_turn(LINES, i),
        "marker": in_turn(MARKERS, i),
        "markerfacecolor": "none",
    }


def new_figure(
    width: float = 7.5, height: float = 3.4, *, rows: int = 1, columns: int = 1, grid: str = "y"
) -> tuple[Figure, list[Axes]]:
    """A figure in the course's style and a flat list of its axes.

    Args:
        width, height: in inches.
        rows, columns: of axes.
        grid: axis with grid lines: "y", "x", or "" for none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: nothing is kept in a global list, nothing shows twice
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(False)
        if grid:
            axis.grid(axis=grid, color="#DDDDDD", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def diagram(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """A figure without axes, for boxes and arrows."""
    figure, (axis,) = new_figure(width, height, grid="")
    axis.set_axis_off()
    axis.set_title(title)
    return figure, axis


def box(axis: Axes, x: float, y: float, width: float, height: float, colour: str, **options: Any) -> None:
    """Draw a rectangle, its lower left corner at (x, y); white edge unless `options` say otherwise."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), width, height, facecolor=colour, **{"edgecolor": "white", **options}))


def patch(colour: str, hatch: str = "", edge: str = "white", linewidth: float = 0.4) -> Any:
    """A filled rectangle for a legend."""
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=linewidth)


def legend_below(figure: Figure, entries: Mapping[str, Any] | None = None, *, columns: int = 4) -> None:
    """The figure's legend below its axes: label -> handle, or what the axes have by themselves."""
    given = () if entries is None else (list(entries.values()), list(entries))
    figure.legend(*given, frameon=False, ncols=columns, loc="outside lower center")


def stacked_bars(
    axis: Axes, places: Sequence[float], parts: Sequence[tuple[str, Sequence[float], str, str]], height: float = 0.6
) -> list[float]:
    """Draw horizontal bars at `places` from `parts`, each (label, one length per bar, colour, hatch); returns their ends."""
    ends = [0.0] * len(places)
    for label, lengths, colour, hatch in parts:
        axis.barh(places, lengths, height, left=ends, label=label, color=colour, hatch=hatch, edgecolor="white")
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    return ends


def require(values: Any, what: str) -> None:
    """Raise ValueError where there is nothing to draw; `what` names one thing to give."""
    if not values:
        raise ValueError(f"There is nothing to draw: give at least one {what}.")


def note_above(axis: Axes, note: str) -> None:
    """Write what a figure rests on, small, above its upper right corner."""
    axis.text(1, 1.01, note, transform=axis.transAxes, ha="right", va="bottom", fontsize=8)


class Picture:
    """A figure for a page: `data` as SVG, or as PNG with `PIXELS` pixels for each of the page's, `width` of them wide.

    `alt` is its text for readers who do not see it. It is shown as HTML: JupyterLab leaves out the text of an output that
    is a picture, and a page that does not trust a notebook shows no SVG of its own.
    """

    def __init__(self, data: bytes, alt: str, width: int) -> None:
        self.data, self.alt, self.width = data, alt, width

    @property
    def html(self) -> str:
        """The picture as HTML: a white card, also on a dark page, and no wider than the page."""
        kind = "png" if self.data.startswith(b"\x89PNG") else "svg+xml"
        source = f"data:image/{kind};base64,{base64.b64encode(self.data).decode()}"
        look = f"width='{self.width}' style='max-width: 100%; height: auto; background: #fff; border-radius: 8px'"
        return f"<img class='figure' alt='{html.escape(self.alt)}' {look} src='{source}'>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"Figure: {self.alt}"


def picture(figure: Figure, alt: str) -> Picture:
    """The figure for the page, with ``alt`` as its text for readers who do not see it."""
    if not alt.strip():
        raise ValueError("A figure needs its alternative text: one sentence that says what it shows.")
    drawn = svg(figure)
    if len(drawn) > SVG_BYTES:
        drawn = min(drawn, png(figure), key=len)
    return Picture(drawn, alt, round(SCALE * 96 * figure.get_figwidth()))


def svg(figure: Figure) -> bytes:
    """The figure as SVG whose text is text, in a fifth of what Matplotlib writes: a notebook holds a dozen of them."""
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "figure"}):  # the same figure gives the same bytes
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r"\s+", " ", written.getvalue()).replace("> <", "><")
    text = re.sub(r"<!--.*?-->", "", text[text.index("<svg") :])
    text = re.sub(r"<pattern.*?</pattern>", lambda pattern: _round_dots(pattern[0]), text)
    text = re.sub(r"<[^>]+>", _shorter, text)  # the elements, not the words between them
    names = [name for name in re.findall(r' id="([^"]*)"', text) if f"#{name}" in text]
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in names else "", text)
    for i, name in enumerate(names):
        text = text.replace(f'"{name}"', f'"n{i}"').replace(f"#{name}", f"#n{i}")
    text = re.sub(r"<g>(<(?:path|use)[^>]*/>|<text[^>]*>[^<]*</text>)</g>", r"\1", text)
    rules = {style: f"s{i}" for i, style in enumerate(dict.fromkeys(re.findall(r' style="([^"]*)"', text)))}
    text = re.sub(r' style="([^"]*)"', lambda found: f' class="{rules[found[1]]}"', text)
    sheet = "".join(f".{name}{{{style}}}" for style, name in rules.items())
    return text.replace("*{", f"text{{{FONTS}}}{sheet}*{{", 1).encode()


def _shorter(element: re.Match[str]) -> str:
    """One element: its font is the page's, and a place is told to a tenth of a point, a width or opacity to a hundredth."""

    def rounded(number: re.Match[str]) -> str:
        value = float(number[0])
        return f"{value:.{1 if abs(value) >= 2 else 2}f}".rstrip("0").rstrip(".")

    short = re.sub(r' *font-family: [^;"]*;?| transform="rotate\(-0 [^)]*\)"', "", element[0])
    short = re.sub(r"(?<=[MLQCz]) | (?=[MLQCz][ \"])", "", short)
    short = re.sub(r"-?\d+\.\d+", rounded, short)
    short = re.sub(r"M(\S+) (\S+)L\1 (\S+)L(\S+) \3L\4 \2(?:L\1 \2)?z", r"M\1 \2V\3H\4V\2z", short)  # a box, down first
    return re.sub(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4(?:L\1 \2)?z", r"M\1 \2H\3V\4H\1z", short)  # or across


def _round_dots(pattern: str) -> str:
    """A hatch's 250 dots ("..", not "oo"), each a circle of eight curves, as lines of no length with round ends."""
    thin = "stroke-width: 1.0; stroke-linecap: butt"
    if thin not in pattern or " C " not in pattern:
        return pattern
    dots = re.sub(r"M (\S+) (\S+) C[^z]*z", r"M \1 \2 h 0", pattern)
    return dots.replace(thin, "stroke-width: 2; stroke-linecap: round")


def png(figure: Figure) -> bytes:
    """The figure as a PNG of 64 colours, a third of the usual size."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=PIXELS * SCALE * 96)
    # an octree keeps small areas' colours, a marker's or a legend's, which a median cut gives away
    octree = Image.Quantize.FASTOCTREE
    Image.open(drawn).convert("RGB").quantize(64, method=octree, dither=Image.Dither.NONE).save(
        small, "png", optimize=True
    )
    return small.getvalue()
