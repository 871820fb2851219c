"""YAML for people to read: keys in their order, scripts as blocks, a comment on top."""

from __future__ import annotations

from typing import Any

import yaml

WIDTH = 110


class _Dumper(yaml.SafeDumper):
    """Indents lists under their key, as Kubernetes' documentation does, and writes no anchors."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(values: dict[str, Any], comment: str = "") -> str:
    """Write one YAML document with a comment above it."""
    above = "".join(f"# {text}\n" if text else "#\n" for text in comment.splitlines())
    return above + yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)
