"""Small things for the page: a program's source, a table."""

from __future__ import annotations

import html
import inspect
import os
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any


class _Page:
    """Shown as HTML in a notebook and as text elsewhere."""

    def __init__(self, as_html: str, as_text: str) -> None:
        self._html, self._text = as_html, as_text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


def show(thing: ModuleType | FunctionType | type) -> _Page:
    """The source of a module, function or class, folded, in the page.

    Raises:
        ValueError: something that has no Python source.
    """
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    try:
        source = inspect.getsource(thing)
    except (TypeError, OSError):
        raise ValueError(f"{thing!r} has no Python source to show; give a module, a function or a class.") from None
    name = thing.__name__
    where = os.path.basename(inspect.getsourcefile(thing) or "")
    body = highlight(source, PythonLexer(), HtmlFormatter(noclasses=True, style="default"))
    summary = f"Source of <code>{html.escape(name)}</code> ({html.escape(where)}, {source.count(chr(10))} lines)"
    return _Page(f"<details><summary>{summary}</summary>{body}</details>", source)


def table(rows: Sequence[dict[str, Any]], *, caption: str = "") -> _Page:
    """Rows of equal keys as a table; numbers aligned right, thousands separated.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("A table needs at least one row.")
    columns = list(rows[0])

    def cell(value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return str(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"

    cells = [[cell(row.get(c, "")) for c in columns] for row in rows]
    right = [all(isinstance(row.get(c), (int, float)) for row in rows) for c in columns]
    widths = [max(len(c), *(len(r[i]) for r in cells)) for i, c in enumerate(columns)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)).rstrip()]
    for row in cells:
        aligned = (v.rjust(w) if r else v.ljust(w) for v, w, r in zip(row, widths, right, strict=True))
        lines.append("  ".join(aligned).rstrip())
    head = "".join(f"<th scope='col' style='text-align:left'>{html.escape(c)}</th>" for c in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td style='text-align:{'right' if r else 'left'}'>{html.escape(v)}</td>"
            for v, r in zip(row, right, strict=True)
        )
        + "</tr>"
        for row in cells
    )
    title = f"<caption style='text-align:left'>{html.escape(caption)}</caption>" if caption else ""
    return _Page(
        f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        "\n".join([caption, *lines] if caption else lines),
    )
