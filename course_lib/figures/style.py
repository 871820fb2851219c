"""One look for every picture of the course, and pictures that carry their own description."""

from __future__ import annotations

import base64
import html
import io
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe & Ito's palette, ordered so that neighbours also differ in lightness when printed grey
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "x"]
LINES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))]
HATCHES = ["", "//", "..", "xx", "\\\\", "++", "oo"]
DPI = 90


def in_turn(forms: Sequence[Any], i: int) -> Any:
    """The line, marker or hatch of the ``i``-th series: where its colour comes again, the form is another one."""
    return forms[(i + i // 7) % 7]


def new_figure(width: float = 7.5, height: float = 3.4, *, rows: int = 1, columns: int = 1) -> tuple[Figure, list]:
    """A figure in the course's style; sizes in inches. Returns the figure and a flat list of its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)  # no pyplot: nothing is kept in a global list, nothing shows twice
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


class Picture:
    """A figure for a page: its PNG, and ``alt``, its text for readers who do not see it.

    It is shown as HTML: JupyterLab leaves out the text of an output that is a PNG.
    """

    def __init__(self, data: bytes, alt: str) -> None:
        self.data, self.alt = data, alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": image_element(self.data, self.alt), "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"Figure: {self.alt}"


def picture(figure: Figure, alt: str) -> Picture:
    """The figure for the page, with ``alt`` as its text for readers who do not see it.

    Raises:
        ValueError: no description.
    """
    if not alt.strip():
        raise ValueError("A figure needs its alternative text: one sentence that says what it shows.")
    return Picture(png(figure), alt)


def png(figure: Figure) -> bytes:
    """The figure as a PNG of 64 colours, a third of the usual size: a notebook with all its figures stays below 400 KB."""
    from PIL import Image as Pillow

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    image = Pillow.open(drawn).convert("RGB").quantize(64, dither=Pillow.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def as_html(figure: Figure, alt: str) -> str:
    """The figure as an HTML element, for widgets."""
    return image_element(png(figure), alt)


def image_element(data: bytes, alt: str) -> str:
    """A PNG and its text as one HTML element."""
    return f"<img alt='{html.escape(alt)}' src='data:image/png;base64,{base64.b64encode(data).decode()}'>"


def nice_bytes(value: float) -> str:
    """``5767168`` -> ``"5.50 MiB"``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} bytes"


def nice_number(value: float) -> str:
    """``1234567`` -> ``"1,234,567"``: whole numbers and those from 1000 on in full, others in 4 digits."""
    if isinstance(value, numbers.Integral):
        return f"{value:,}"
    return f"{float(value):,.0f}" if abs(value) >= 1000 else f"{float(value):.4g}"
