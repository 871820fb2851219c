"""The course's pictures among the stored outputs of a notebook."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

_ELEMENT = re.compile(r"<img alt='(?P<alt>[^']*)' src='data:image/png;base64,(?P<data>[^']*)'>")


def pictures(output: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(PNG in base64, alternative text) of each picture in one output of a cell, as JSON or nbformat has it."""
    shown = output.get("data", {}).get("text/html", "")
    text = shown if isinstance(shown, str) else "".join(shown)
    return [(found["data"], html.unescape(found["alt"])) for found in _ELEMENT.finditer(text)]
