"""Where a link of the repository points on the site: to a page, or to the repository's address."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

_MARKDOWN = re.compile(r"(?<=\]\()(?P<target>[^\s()<>]+)(?=\))")
_HTML = re.compile(r"""(?<=\bhref=)(?P<quote>["'])(?P<target>[^"']+)(?P=quote)""")
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)


class Links:
    """`pages`: path in the repository -> path on the site; `address`: the repository's; `root`: its folder here."""

    def __init__(self, pages: Mapping[str, str], address: str, root: Path) -> None:
        self.pages, self.address, self.root = pages, address, root
        self._on_site = set(pages.values())

    def blob(self, path: str) -> str:
        """The address of a file, or of a folder, of the repository: `path` counts from its root."""
        kind = "tree" if (self.root / path).is_dir() else "blob"
        return f"{self.address}/{kind}/main/{path}"

    def target(self, link: str, here: str, seen_from: str | None = None) -> str:
        """Where `link`, found in the repository's file `here`, leads on the site's page `seen_from` (its own page).

        A link to nothing stays as it is: Sphinx says so.
        """
        path, hash_, fragment = link.partition("#")
        if not path or re.match(r"[a-zA-Z][\w+.-]*:|//", path):
            return link
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        page = self.pages.get(wanted)
        if page is None and wanted.startswith("site/") and wanted.removeprefix("site/") in self._on_site:
            page = wanted.removeprefix("site/")  # a page of site/ may name its neighbours as they lie on the site
        if page is not None:
            own = seen_from or self.pages[here]
            return posixpath.relpath(page, posixpath.dirname(own) or ".") + hash_ + slug(fragment)
        if not wanted.startswith("..") and (self.root / wanted).exists():
            return self.blob(wanted) + hash_ + fragment
        return link

    def rewrite(self, text: str, here: str) -> str:
        """The Markdown of the repository's file `here` with its links as the site needs them; code stays as it is."""

        def markdown(found: re.Match) -> str:
            return self.target(found["target"], here)

        done, at = [], 0
        for fence in [*_FENCE.finditer(text), None]:
            end = fence.start() if fence else len(text)
            done.append(self.html(_MARKDOWN.sub(markdown, text[at:end]), here))
            if fence:
                done.append(fence[0])
                at = fence.end()
        return "".join(done)

    def html(self, text: str, here: str, seen_from: str | None = None) -> str:
        """HTML of the repository's file `here` with its links as the site needs them."""

        def in_html(found: re.Match) -> str:
            leads = self.target(found["target"], here, seen_from)
            if not leads.startswith(self.address):
                leads = re.sub(r"\.(?:ipynb|md)(?=#|$)", ".html", leads)
            return found["quote"] + leads + found["quote"]

        return _HTML.sub(in_html, text)


def slug(heading: str) -> str:
    """JupyterLab's anchor of a heading, `Where-you-stand`, as the site's: `where-you-stand`."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))
