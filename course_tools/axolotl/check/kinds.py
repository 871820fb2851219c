"""Whether a value is what the schema asks for, by the rules of pydantic, which Axolotl reads its YAML with."""

from __future__ import annotations

import math
from typing import Any

TRUE, FALSE = ("true", "yes", "on", "t", "y", "1"), ("false", "no", "off", "f", "n", "0")
WORDS = {
    "integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text",
    "array": "a list", "object": "a mapping of keys", "null": "nothing",
}  # fmt: skip
MOST_SHOWN = 8


class Mismatch(Exception):
    """The value is not what is asked for."""


def options(schema: dict[str, Any], defs: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema, references followed; nothing for one that takes anything."""
    if "$ref" in schema:
        return options(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return [one for alternative in schema["anyOf"] for one in options(alternative, defs)]
    return [schema] if schema.keys() & {"type", "enum", "const", "properties"} else []


def accepted(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> Any:
    """A scalar as Axolotl would take it: "2048" as 2048 where a whole number is asked for.

    Raises:
        Mismatch: no alternative takes it.
    """
    alternatives = options(schema, defs)
    if (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, str) and "\0" in value):
        raise Mismatch
    if not alternatives:
        return value
    exact = [one for one in alternatives if _is(value, one)]
    if exact:
        return value
    for one in alternatives:
        try:
            return _bounded(_coerced(value, one), one)
        except Mismatch:
            continue
    raise Mismatch


def expected(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    """What the schema asks for, in words."""
    words: list[str] = []
    for one in options(schema, defs):
        if "enum" in one:
            shown = [str(each) for each in one["enum"][:MOST_SHOWN]]
            words.append("one of " + ", ".join(shown) + (", …" if len(one["enum"]) > MOST_SHOWN else ""))
        elif "const" in one:
            words.append(str(one["const"]))
        elif one.get("type") != "null":
            words.append(WORDS.get(one.get("type", "object"), "something else") + _bounds(one))
    return " or ".join(dict.fromkeys(words)) or "nothing"


def _bounds(one: dict[str, Any]) -> str:
    text = ""
    for name, word in (
        ("minimum", "from"),
        ("exclusiveMinimum", "above"),
        ("maximum", "to"),
        ("exclusiveMaximum", "below"),
    ):
        text += f" {word} {one[name]}" if name in one else ""
    return text


def _is(value: Any, one: dict[str, Any]) -> bool:
    """Of the type itself, nothing converted."""
    if "const" in one:
        return value == one["const"] and type(value) is type(one["const"])
    if "enum" in one:
        return isinstance(value, str) and value in one["enum"]
    kind = one.get("type", "object")
    right = {
        "integer": type(value) is int, "number": type(value) in (int, float), "boolean": type(value) is bool,
        "string": isinstance(value, str), "null": value is None, "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }[kind]  # fmt: skip
    if right and kind in ("integer", "number"):
        try:
            _bounded(value, one)
        except Mismatch:
            return False
    return right


def _coerced(value: Any, one: dict[str, Any]) -> Any:
    kind = one.get("type", "object")
    if "const" in one or "enum" in one or not isinstance(value, bool | int | float | str):
        raise Mismatch
    try:
        if kind == "boolean":
            word = str(value).lower()
            if word in ("1.0", "0.0") or word in TRUE or word in FALSE:
                return word in TRUE or word == "1.0"
        elif kind == "number" and math.isfinite(float(value)):
            return float(value)
        elif kind == "integer":
            if isinstance(value, float) and not value.is_integer():
                raise Mismatch
            return int(value)
    except (ValueError, OverflowError):
        raise Mismatch from None
    raise Mismatch


def _bounded(value: Any, one: dict[str, Any]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    low, high = one.get("minimum", -math.inf), one.get("maximum", math.inf)
    above, below = one.get("exclusiveMinimum", -math.inf), one.get("exclusiveMaximum", math.inf)
    if value < low or value > high or (value <= above and above > -math.inf) or (value >= below and below < math.inf):
        raise Mismatch
    return value
