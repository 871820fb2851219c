"""The course's pictures among the stored outputs of a notebook."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

_ELEMENT = re.compile(r"<img class='figure' alt='(?P<alt>[^']*)'[^>]* src='(?P<source>data:image/[^']*)'>")


def pictures(output: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(source, alternative text) of each picture in one output of a cell; a source is a data URI: SVG or PNG in base64."""
    shown = output.get("data", {}).get("text/html", "")
    text = shown if isinstance(shown, str) else "".join(shown)
    return [(found["source"], html.unescape(found["alt"])) for found in _ELEMENT.finditer(text)]
