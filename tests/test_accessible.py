"""The course for readers who do not see colours, or do not see: figures, their texts, the order of headings."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from course_lib.figures import style

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path for folder in ("lessons", "labs", "solutions") for path in (ROOT / folder).glob("0*.ipynb"))

# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, A Physiologically-based Model for Simulation of Color Vision
# Deficiency (2009): linear RGB as who lacks one kind of cone sees it, at full severity.
VISION = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
APART = 10.0
"""CIELAB units between two colours that stand for two things; about 2.3 can just be told apart side by side."""


def linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    """CIELAB (D65) of linear sRGB."""
    r, g, b = (min(1.0, max(0.0, c)) for c in rgb)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    rgb = linear(colour)
    return lab([sum(m * c for m, c in zip(row, rgb, strict=True)) for row in VISION[vision]])


@pytest.mark.parametrize("vision", VISION)
def test_the_palette_can_be_told_apart(vision):
    for a, b in itertools.combinations(style.COLOURS, 2):
        assert sum((p - q) ** 2 for p, q in zip(seen(a, vision), seen(b, vision), strict=True)) ** 0.5 >= APART, (a, b)


def test_the_ruler_tells_red_from_green_only_with_all_cones():
    def apart(a, b, vision):
        return sum((p - q) ** 2 for p, q in zip(seen(a, vision), seen(b, vision), strict=True)) ** 0.5

    assert apart("#A05A00", "#5A7800", "usual") > 3 * APART > 3 * apart("#A05A00", "#5A7800", "deuteranopia")


def headings(cells: list[dict]) -> list[tuple[int, str]]:
    found = []
    for cell in cells:
        if cell["cell_type"] == "markdown":
            text = re.sub(r"^(```|~~~).*?^\1", "", "".join(cell["source"]), flags=re.MULTILINE | re.DOTALL)
            found += [(len(m[1]), m[2]) for m in re.finditer(r"^(#{1,6}) +(.*)$", text, re.MULTILINE)]
    return found


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_headings_are_in_order_and_every_figure_has_its_text(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    levels = headings(cells)
    assert levels[0][0] == 1 and sum(level == 1 for level, _ in levels) == 1, "one title, at the top"
    for (above, _), (level, title) in itertools.pairwise(levels):
        assert level <= above + 1, f"{title!r}: a level was left out above it"
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        assert "image/png" not in data, "JupyterLab shows a PNG without its text: use course_lib.figures.style.picture"
        for image in re.findall(r"<img\b[^>]*>", "".join(data.get("text/html", ""))):
            assert re.search(r"\balt=['\"][^'\"]{30}", image), image[:80]


# ------------------------------------------------------------------------------- every figure that any test draws
def test_legends_are_read_without_colour():
    """`conftest.py` looks at every figure of the session; here it is shown one that fails and one that does not."""
    from readable import told_apart_in_grey

    figure, (axis, _) = style.new_figure(columns=2)
    axis.plot([0, 1], [0, 1], color=style.COLOURS[2], label="one")
    axis.plot([0, 1], [1, 0], color=style.COLOURS[3], label="two")
    axis.legend()
    assert told_apart_in_grey(figure) == ["'one' and 'two' differ by nothing but a colour that is the same grey"]
    axis.lines[1].set_linestyle("--")
    axis.legend()
    assert told_apart_in_grey(figure) == []
