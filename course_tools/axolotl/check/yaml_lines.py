"""A YAML with the place of each key: read as PyYAML reads it, and asked what PyYAML does not say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
EXPONENT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+|[-+]?\.\d+[eE]\d+")


@dataclass(frozen=True)
class Document:
    """A YAML file's mapping.

    Attributes:
        values: what `yaml.safe_load` gives, which is what Axolotl sees.
        lines: the line of each key, from 1, by its path: ("datasets", 0, "path").
        duplicates: keys that stand there more than once: their path and the lines of the earlier ones, which do not count.
        plain_strings: paths of unquoted words and numbers that YAML 1.1 reads as text though they look like numbers (1e-4).
        path: of the file; None for values that came without one.
    """

    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    duplicates: tuple[tuple[KeyPath, int], ...] = ()
    plain_strings: frozenset[KeyPath] = frozenset()
    path: Path | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Document:
        """A document of values that came without a file."""
        return cls(dict(values), plain_strings=frozenset(_exponents(values, ())))

    def value(self, *path: str | int) -> Any:
        """The value at a path; None where there is none."""
        found: Any = self.values
        for step in path:
            try:
                found = found[step]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    def line(self, *path: str | int) -> int | None:
        """The line of a key, or of the nearest key around it; None where no file was read."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


def read_yaml(path: str | os.PathLike[str]) -> Document:
    """A YAML file with the line of each key."""
    place = Path(path)
    return parse(text_of(place), place)


def text_of(place: Path) -> str:
    """A YAML file's text. Raises ValueError, in one sentence, where it cannot be read."""
    if place.is_dir():
        raise ValueError(f"{place} is a folder: give the YAML file itself.")
    try:
        return place.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{place} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{place} is no text file: a YAML is UTF-8.") from None


def parse(text: str, path: Path | None = None) -> Document:
    """As `read_yaml`, of text."""
    name = path or "The YAML"
    root, values = loaded(text, name)
    if values is None:
        raise ValueError(f"{name} is empty: an Axolotl run needs base_model, datasets and learning_rate at least.")
    lines: dict[KeyPath, int] = {}
    duplicates: list[tuple[KeyPath, int]] = []
    plain: set[KeyPath] = set()
    for key, node, value in _walk(root, (), frozenset()):
        if key in lines:
            duplicates.append((key, lines[key]))
        lines[key] = node.start_mark.line + 1
        if isinstance(value, yaml.ScalarNode) and value.tag.endswith(":str") and value.style is None:
            if EXPONENT.fullmatch(value.value):
                plain.add(key)
    return Document(values, lines, tuple(duplicates), frozenset(plain), path)


def loaded(text: str, name: Any) -> tuple[yaml.Node | None, dict[str, Any] | None]:
    """A YAML text's node and its mapping, None where it is empty; `name` says in an error which one it was."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        values = loader.construct_document(root) if root is not None else None
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{name} is no YAML: {_where(error)}.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is no YAML: {_special(error, text)}.") from None
    except (RecursionError, ValueError, OverflowError, KeyError) as error:  # a date of month 13, 1,000 brackets
        raise ValueError(f"{name} cannot be read as YAML: {str(error) or type(error).__name__}.") from None
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{name} holds a {type(values).__name__}, and a configuration is lines of `key: value`.")
    return root, values


def written_number(text: str) -> str:
    """1e3 as 1000 and 1e-4 as 1.0e-4, which YAML 1.1 takes for numbers."""
    number = float(text)
    if number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    mantissa, _, exponent = text.lower().partition("e")
    sign = "" if exponent.startswith(("-", "+")) else "+"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"


def _exponents(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        yield path
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _exponents(item, (*path, key))


def _walk(node: yaml.Node, path: KeyPath, above: frozenset[int]) -> Iterator[tuple[KeyPath, yaml.Node, yaml.Node]]:
    """Every key and list item: its path, the node whose line it stands on, the node of its value."""
    if id(node) in above:  # an alias inside its own anchor
        return
    above |= {id(node)}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                yield (*path, key.value), key, value
                yield from _walk(value, (*path, key.value), above)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item, item
            yield from _walk(item, (*path, index), above)


def _where(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = error.problem or error.context or "it does not parse"
    if "cannot start any token" in problem and "\\t" in problem:
        problem = "a tab, where YAML is indented by spaces"
    elif "mapping values are not allowed here" in problem:
        problem = "a second colon on the line, or a line that is indented too far"
    return place + problem


def _special(error: yaml.YAMLError, text: str) -> str:
    position = getattr(error, "position", None)
    if position is None:
        return str(error).splitlines()[0]
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return f"line {line}, column {column}: a character that YAML does not allow"
