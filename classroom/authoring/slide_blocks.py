"""Pieces of a lesson as HTML that needs nothing from elsewhere: text, formulas, code, tables, figures."""

from __future__ import annotations

import base64
import functools
import html
import io
import re
import struct
from dataclasses import dataclass
from typing import Any

from course_lib.figures.stored_figures import pictures

LINE, CODE_LINE, ROW = 34, 23, 34  # px on a slide of 1280 x 720
TEXT_WIDTH = 98  # characters of text in a line, about
FOLD_LINES = 18  # a longer cell is folded where it has a figure or a table to show, and scrolls where it has none
SCROLL_LINES = 22
FIGURE_HEIGHT = 440
NO_WIDGET = "(Menus and sliders: in the running notebook.)"


@dataclass
class Block:
    """A piece that is not cut further. `height` is an estimate in px; `asks` ends its slide: the answer comes next."""

    html: str
    height: int
    asks: bool = False


@functools.cache
def _markdown() -> Any:
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return formula(body)

        def block_math(self, body: str) -> str:
            return f'<span class="display">{formula(body)}</span>'

        def link(self, text: str, url: str, title: str | None = None) -> str:
            # A slide lies elsewhere than its lesson: what is relative to the lesson would lead nowhere.
            return super().link(text, url, title) if text and url.startswith(("https://", "http://")) else text

        def image(self, text: str, url: str, title: str | None = None) -> str:
            return ""  # lessons show what they compute; a badge is fetched from elsewhere, and nobody clicks a slide's

        def heading(self, text: str, level: int, **attrs: Any) -> str:
            return f"<h{level}>{text}</h{level}>\n"

    return MarkdownWithMath(renderer=Renderer(escape=False))


def formula(tex: str) -> str:
    """A TeX formula as a drawing, with the TeX for who cannot see it. What matplotlib cannot draw stays TeX."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    drawn, words = io.BytesIO(), html.escape(tex.strip(), quote=True)
    try:
        depth = math_to_image(f"${tex.strip()}$", drawn, prop=FontProperties(size=24), dpi=72, format="svg")
    except ValueError:
        return f"<code>{words}</code>"
    data = base64.b64encode(drawn.getvalue()).decode()
    style = f"vertical-align: {-depth:.0f}px"
    return f'<img class="formula" alt="{words}" style="{style}" src="data:image/svg+xml;base64,{data}">'


def markdown(text: str) -> str:
    """Markdown of a lesson or a note as HTML; relative links become plain text."""
    return str(_markdown().render(text))


def inline(text: str) -> str:
    """A heading's Markdown as HTML without the heading around it ("3. What it costs" is no item of a list)."""
    return markdown(f"# {text}").strip().removeprefix("<h1>").removesuffix("</h1>")


def text_blocks(source: str) -> list[Block]:
    """The paragraphs, lists, tables and fences of a Markdown text, in order; long lists item by item."""
    return [block for piece in _pieces(source) if (block := _text_block(piece)).html != "<p></p>\n"]


def _pieces(source: str) -> list[str]:
    pieces: list[list[str]] = [[]]
    fenced = False
    for line in source.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.strip():
            pieces.append([])
        else:
            pieces[-1].append(line)
    found = []
    for lines in filter(None, pieces):
        starts = [i for i, line in enumerate(lines) if re.match(r"(-|\d+\.) ", line)]
        if starts[:1] == [0] and sum(map(_lines_of, lines)) > 9:
            found += ["\n".join(lines[a:b]) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
        else:
            found.append("\n".join(lines))
    return found


def _lines_of(line: str) -> int:
    return -(-max(len(line), 1) // TEXT_WIDTH)


def _text_block(piece: str) -> Block:
    made = markdown(piece)
    # What follows a question waits for the next key: say your answer first.
    parts = re.split(r"(<strong>[^<]*\?</strong>)", made)
    if asks := len(parts) > 1:
        tail = re.sub(r"(.+?)(?=</p>|</li>|$)", r'<span class="later">\1</span>', parts[-1], count=1, flags=re.DOTALL)
        rest = parts[-1] if not re.sub(r"<[^>]*>|[\s.)]", "", parts[-1]) else tail
        made = "".join(parts[:-1]).replace("<strong>", '<strong class="asks">') + rest
    if piece.lstrip().startswith("|"):
        rows = [line for line in piece.splitlines() if line.strip()]
        return Block(f'<div class="table">{made}</div>', sum(ROW * -(-len(row) // 110) for row in rows), asks)
    if piece.lstrip().startswith("```"):
        return Block(made, CODE_LINE * (piece.count("\n") + 1), asks)
    if piece.startswith("$$"):
        return Block(made, 2 * LINE, asks)
    return Block(made, LINE * sum(map(_lines_of, piece.splitlines())) + 12, asks)


def code_block(source: str, *, folded: bool) -> Block:
    """A cell's code. Folded: a line that opens over the slide; else it stands there, and scrolls where it is long."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    made = highlight(
        source, PythonLexer(), HtmlFormatter(noclasses=True, style="default", cssclass="code", nobackground=True)
    )
    lines = source.count("\n") + 1
    if folded:
        return Block(f"<details><summary>The code of this cell, {lines} lines</summary>{made}</details>", 40)
    scrolls = f'<div class="scrolls" tabindex="0" role="region" aria-label="code, {lines} lines">{made}</div>'
    return Block(scrolls, CODE_LINE * min(lines, SCROLL_LINES) + 24)


def output_block(output: dict[str, Any]) -> Block | None:
    """What a cell printed, drew or tabled, as it lies in the notebook; None where there is nothing to see."""
    if output["output_type"] == "stream":
        return _printed(_joined(output["text"]))
    data = output.get("data", {})
    made = _joined(data.get("text/html", ""))
    if made.startswith("<img") and (drawn := pictures(output)):
        return _figure(*drawn[0])
    if any("widget" in kind for kind in data):
        return Block(f"<p>{NO_WIDGET}</p>" + made, LINE + 12 + ROW * 9 * ("<img" in made))
    if "text/html" in data:
        height = 40 if made.startswith("<details") else ROW * (made.count("<tr") + 1 + ("<img" in made) * 9)
        return Block(f'<div class="table">{made}</div>', height)
    if "text/markdown" in data:
        return _text_block(_joined(data["text/markdown"]))
    return _printed(_joined(data["text/plain"])) if "text/plain" in data else None


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _printed(text: str) -> Block | None:
    if not text.strip():
        return None
    lines = sum(-(-max(len(line), 1) // 112) for line in text.rstrip().splitlines())
    made = f'<pre class="printed">{html.escape(text.rstrip())}</pre>'
    return Block(
        f'<div class="scrolls" tabindex="0" role="region" aria-label="printed">{made}</div>',
        CODE_LINE * min(lines, SCROLL_LINES) + 24,
    )


def _figure(data: str, alt: str) -> Block:
    width, height = struct.unpack(">II", base64.b64decode(data[:64])[16:24])
    scale = min(FIGURE_HEIGHT / height, 1180 / width, 1.6)
    size = f'width="{width * scale:.0f}" height="{height * scale:.0f}"'
    made = f'<img class="figure" {size} alt="{html.escape(alt, quote=True)}" src="data:image/png;base64,{data}">'
    return Block(made, round(height * scale) + 8)
