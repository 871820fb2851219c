"""Every link of a built site, followed: to its file, to its fragment; and nothing may be fetched from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself, without a click.
_FETCHED = {"script", "img", "source", "iframe", "audio", "video", "embed", "object", "link", "track"}
_CSS = re.compile(r"""url\(\s*["']?(?P<a>[^"')\s]+)|@import\s+["'](?P<b>[^"']+)""")


class _Page(HTMLParser):
    """The ids of a page, and what it refers to as (tag, address)."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.refers: list[tuple[str, str]] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._style = tag == "style"
        for key, value in attrs:
            if key == "id" or (key == "name" and tag == "a"):
                self.ids.add(value or "")
            elif key in ("href", "src", "data", "poster", "action") and value is not None:
                self.refers.append((tag, value.strip()))
            elif key == "srcset" and value:
                self.refers += [(tag, part.split()[0]) for part in value.split(",") if part.strip()]
            elif key == "style" and value:
                self.refers += [("style", found["a"] or found["b"]) for found in _CSS.finditer(value)]

    def handle_data(self, data: str) -> None:
        if self._style:
            self.refers += [("style", found["a"] or found["b"]) for found in _CSS.finditer(data)]

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def check(site: Path) -> tuple[list[str], set[str]]:
    """(what is wrong, one sentence each; the addresses outside that a reader may click)."""
    site = site.resolve()
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    refers = [(path, *reference) for path, page in pages.items() for reference in page.refers]
    for path in sorted(site.rglob("*.css")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        refers += [(path, "style", found["a"] or found["b"]) for found in _CSS.finditer(text)]
    problems: dict[str, None] = {}  # a set that keeps its order
    outside: set[str] = set()
    for path, tag, address in refers:
        where = path.relative_to(site).as_posix()
        parts = urlsplit(address)
        if parts.scheme in ("data", "mailto", "javascript"):
            continue
        if parts.scheme or parts.netloc:
            if tag in _FETCHED or tag == "style":
                problems[f"{where}: <{tag}> is fetched from {parts.netloc or address}; keep it in the site"] = None
            else:
                outside.add(address)
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target /= "index.html"
        if not target.is_file() or not target.is_relative_to(site):
            problems[f"{where}: {address} is no file of the site"] = None
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
            problems[f"{where}: {address} is no place on that page"] = None
    return list(problems), outside
