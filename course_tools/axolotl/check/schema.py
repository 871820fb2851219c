"""The keys that Axolotl knows, stored: its own schema takes ten seconds to import, and a check must not.

``python -m course_tools.axolotl.check.schema`` writes schema.json again from the installed Axolotl.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("schema.json")
KEPT = {"type", "anyOf", "$ref", "items", "enum", "const", "properties", "additionalProperties", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "default", "deprecated"}  # fmt: skip


@cache
def stored() -> dict[str, Any]:
    """The schema as stored.

    Keys: "axolotl" (its version), "config" (JSON schema of a YAML), "plugins" (key -> the plugin that brings it),
    "optimizers", "schedulers", "attention" (names that are accepted).
    """
    return json.loads(STORED.read_text(encoding="utf-8"))


def installed_version() -> str | None:
    """Axolotl's version, without importing it; None if it is not installed."""
    try:
        return metadata.version("axolotl")
    except metadata.PackageNotFoundError:
        return None


def made() -> dict[str, Any]:
    """The schema of the Axolotl that is installed. Imports it, and with it PyTorch.

    Raises:
        ImportError: Axolotl is not installed.
    """
    import axolotl.integrations
    from axolotl.integrations.base import BUILTIN_PLUGINS
    from axolotl.utils.schemas.config import AxolotlInputConfig
    from axolotl.utils.schemas.enums import CANONICAL_ATTN_IMPLS, CustomSupportedOptimizers
    from pydantic.json_schema import GenerateJsonSchema
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    class Named(GenerateJsonSchema):
        """Members of an enumeration by name where their values are no JSON (torch.int8)."""

        def enum_schema(self, schema: Any) -> dict[str, Any]:
            plain = all(isinstance(member.value, str | int) for member in schema["members"])
            return {"enum": [member.value if plain else member.name for member in schema["members"]]}

        def emit_warning(self, kind: Any, detail: str) -> None:
            """Defaults that are no JSON are left out; nothing here needs them."""

    config = AxolotlInputConfig.model_json_schema(schema_generator=Named)
    by_name = AxolotlInputConfig.model_json_schema(schema_generator=Named, by_alias=False)
    config["properties"] = by_name["properties"] | config["properties"]
    folder = Path(axolotl.integrations.__file__).parent
    plugins = {}
    always = {plugin.rpartition(".")[2] for plugin in BUILTIN_PLUGINS}
    for name, plugin in _plugins(folder):
        if plugin.rpartition(".")[2] in always:
            config["properties"].setdefault(name, {})
        else:
            plugins[name] = plugin
    return {
        "axolotl": metadata.version("axolotl"),
        "config": _lean({key: config[key] for key in ("properties", "required")} | {"$defs": config["$defs"]}),
        "plugins": dict(sorted(plugins.items())),
        "optimizers": sorted({one.value for one in (*OptimizerNames, *CustomSupportedOptimizers)}),
        "schedulers": sorted({*(one.value for one in SchedulerType), "one_cycle", "rex"}),
        "attention": sorted(CANONICAL_ATTN_IMPLS),
    }


def _plugins(folder: Path) -> list[tuple[str, str]]:
    """(key, the plugin that brings it), read off the source: importing a plugin may need what it integrates."""
    found = []
    for file in sorted([*folder.glob("*/__init__.py"), *folder.glob("*/plugin.py")]):
        text = file.read_text(encoding="utf-8")
        plugin = re.search(r"^class (\w+)\((?:\w+, *)*BasePlugin", text, re.M)
        arguments = re.search(r"def get_input_args\(.*?return \"[\w.]+\.(\w+)\"", text, re.S)
        if plugin and arguments:
            tree = ast.parse(file.with_name("args.py").read_text(encoding="utf-8"))
            name = f"axolotl.integrations.{file.parent.name}.{plugin[1]}"
            found += [(key, name) for key in _fields(tree, arguments[1])]
    return found


def _fields(tree: ast.Module, name: str) -> list[str]:
    """The fields of a class in a module's source: its annotated names."""
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id != "model_config"
    ]


def _lean(node: Any, *, names: bool = False) -> Any:
    """Without titles and descriptions; `names`: the keys of this mapping are the user's, not the schema's."""
    if isinstance(node, list):
        return [_lean(item) for item in node]
    if not isinstance(node, dict):
        return node
    if names:
        return {key: _lean(value) for key, value in sorted(node.items())}
    kept = {key: value for key, value in node.items() if key in KEPT or key in ("$defs", "required")}
    return {
        key: value if key in ("default", "const") else _lean(value, names=key in ("properties", "$defs"))
        for key, value in kept.items()
        if not (key == "default" and value is None)
    }


def text(schema: dict[str, Any]) -> str:
    """As it is stored: one key of Axolotl's a line, so that a change reads as a change."""
    parts = []
    for name, value in schema.items():
        if name in ("config", "plugins"):
            parts.append(f'"{name}": {_lines(value, 2 if name == "config" else 1)}')
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(value: Any, depth: int) -> str:
    if depth == 0 or not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    return "{\n" + ",\n".join(f"{json.dumps(key)}:{_lines(one, depth - 1)}" for key, one in value.items()) + "\n}"


if __name__ == "__main__":
    STORED.write_text(text(made()), encoding="utf-8")
    print(f"{STORED.name}: Axolotl {json.loads(STORED.read_text(encoding='utf-8'))['axolotl']}", file=sys.stderr)
