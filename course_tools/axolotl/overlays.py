"""One base YAML and small overlays: each run is three lines that say what it changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from course_tools.axolotl.check.document import loaded, text_of


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the mapping in a YAML file; an empty file is an empty mapping."""
    return loaded(text_of(path), path) or {}


def laid_over(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `overlay` over `base`: mappings are merged key by key, anything else is replaced, `null` removes a key."""
    result = dict(base)
    for key, value in overlay.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = laid_over(result[key], value)
        else:
            result[key] = value
    return result


def merged(
    base: str | os.PathLike[str] | Mapping[str, Any],
    *overlays: str | os.PathLike[str] | Mapping[str, Any],
    **changes: Any,
) -> dict[str, Any]:
    """Merge `base` and the overlays in their order, with `changes` on top.

    Args:
        base: a YAML file, or its mapping.
        overlays: the same, each laid over what stands so far.
        changes: top-level keys; ``None`` removes a key.
    """
    result: dict[str, Any] = {}
    for layer in (base, *overlays, changes):
        result = laid_over(result, layer if isinstance(layer, Mapping) else read(layer))
    return result


def write(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a configuration as the YAML that ``axolotl train PATH`` takes; returns the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
    return target
