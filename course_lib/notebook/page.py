"""Small things for the page: a program's source, a table."""

from __future__ import annotations

import html
import inspect
import numbers
import os
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from course_lib.units import nice_number

_ON_DARK_PAGES_TOO = "color: #1a1a1a"  # names have no colour of their own: white on a dark page


class Page:
    """Shown as HTML in a notebook and as text elsewhere."""

    def __init__(self, as_html: str, as_text: str) -> None:
        self._html, self._text = as_html, as_text

    def _repr_html_(self) -> str:
        return self._html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self._html, "text/plain": self._text}

    def __repr__(self) -> str:
        return self._text


def show(thing: ModuleType | FunctionType | type | Path) -> Page:
    """The source of a module, function or class, or a file's text with its lines numbered, folded, in the page."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer, find_lexer_class_for_filename, guess_lexer

    lexer = PythonLexer()
    if isinstance(thing, Path):
        source, name, where = thing.read_text(encoding="utf-8"), "", thing.name
        known = find_lexer_class_for_filename(where)
        lexer = known() if known else guess_lexer(source)
    else:
        try:
            source, name = inspect.getsource(thing), thing.__name__
        except (TypeError, OSError, AttributeError):
            raise ValueError(f"{thing!r} has no source to show; give a module, function, class or file.") from None
        where = os.path.basename(inspect.getsourcefile(thing) or "")
    numbers = "inline" if isinstance(thing, Path) else False
    body = highlight(
        source, lexer, HtmlFormatter(linenos=numbers, noclasses=True, style="default", cssstyles=_ON_DARK_PAGES_TOO)
    )
    lines = f"{source.count(chr(10))} lines"
    summary = (
        f"Source of <code>{html.escape(name)}</code> ({html.escape(where)}, {lines})"
        if name
        else f"<code>{html.escape(where)}</code>, {lines}"
    )
    return Page(f"<details><summary>{summary}</summary>{body}</details>", source)


def table(rows: Sequence[dict[str, Any]], *, caption: str = "") -> Page:
    """Rows of equal keys as a table; numbers aligned right, thousands separated."""
    if not rows:
        raise ValueError("A table needs at least one row.")
    keys = list(rows[0])
    columns = [str(key) for key in keys]
    cells = [[nice_number(v) if _is_number(v := row.get(key, "")) else str(v) for key in keys] for row in rows]
    right = [all(_is_number(row.get(key)) for row in rows) for key in keys]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]

    def line(row: list[str]) -> str:
        aligned = (v.rjust(w) if r else v.ljust(w) for v, w, r in zip(row, widths, right, strict=True))
        return "  ".join(aligned).rstrip()

    def html_row(row: list[str], tag: str) -> str:
        sides = ["right" if r else "left" for r in right]
        cells = zip(row, sides, strict=True)
        opened = (f"<{tag} style='text-align:{side}'>{html.escape(value)}" for value, side in cells)
        return f"<tr>{''.join(f'{cell}</{tag.split()[0]}>' for cell in opened)}</tr>"

    lines = [line(row) for row in (columns, *cells)]
    head = html_row(columns, "th scope='col'")
    body = "".join(html_row(row, "td") for row in cells)
    title = f"<caption style='text-align:left'>{html.escape(caption)}</caption>" if caption else ""
    return Page(
        f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody></table>",
        "\n".join([caption, *lines] if caption else lines),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
