"""A YAML as Axolotl reads it, by PyYAML; with the line of each key, and mended without losing a comment, by ruamel.yaml."""

from __future__ import annotations

import copy
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
MOST = 4 * 2**20  # bytes of a file
EXPONENT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+|[-+]?\.\d+[eE]\d+")


class Renamed(str):
    """In a mend, in place of a value: the key's new name."""


@dataclass(frozen=True)
class Document:
    """A YAML file's mapping.

    Attributes:
        values: what `yaml.safe_load` gives, which is what Axolotl sees.
        tree: the same with places and comments; None for values that came without a file. text: of the file.
        twice: a key that stands there once more, and that line; ("", 0) where none does.
        path: of the file; None for values that came without one.
    """

    values: dict[str, Any]
    tree: Any = None
    text: str = ""
    twice: tuple[str, int] = ("", 0)
    path: Path | None = None

    @property
    def texts_like_numbers(self) -> list[KeyPath]:
        """Paths of words that YAML 1.1 reads as text though they look like numbers: 1e-4."""
        return sorted(_exponents(self.values, (), set()), key=str)

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
        node, line = self.tree, None
        for step in path:
            try:
                line = (node.lc.key if isinstance(node, Mapping) else node.lc.item)(step)[0] + 1
                node = node[step]
            except (AttributeError, KeyError, IndexError, TypeError):
                break
        return line

    def mended(self, mends: Mapping[KeyPath, Any]) -> str:
        """The file's text with other values at these paths; None takes a key away. Comments stay."""
        written = io.StringIO()
        if self.tree is not None and not self.twice[0]:
            reader, wanted = _round_trip(self.text), copy.deepcopy(self.values)
            tree = reader.load(self.text)
            for (*above, key), value in mends.items():
                for whole in (tree, wanted):
                    node = whole
                    for step in above:
                        node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]
                    _put(node, key, value)
            reader.dump(tree, written)
            if yaml.safe_load(written.getvalue()) == wanted:
                return written.getvalue()
        raise ValueError(f"{self.path} cannot be written anew without changing what it says: mend it by hand.")


def _put(node: Any, key: str | int, value: Any) -> None:
    if isinstance(value, Renamed) and hasattr(node, "ca"):  # where it stood, with its comment
        place, comment = list(node).index(key), node.ca.items.pop(key, None)
        node.insert(place, str(value), node.pop(key))
        if comment:
            node.ca.items[str(value)] = comment
    elif isinstance(value, Renamed):
        node[str(value)] = node.pop(key)
    elif value is None:
        node.pop(key, None)
    elif isinstance(value, float) and hasattr(node, "ca"):  # 2e-05 would be text again to PyYAML
        node[key] = _round_trip().load(written_number(repr(value)))
    else:
        node[key] = value


def _round_trip(text: str = "", allow_duplicate_keys: bool = False) -> Any:
    """A reader that keeps comments, and indents as `text` does."""
    from ruamel.yaml import YAML  # of the extra "axolotl": a plan's file needs no lines

    reader = YAML(typ="rt", pure=True)
    reader.allow_duplicate_keys = allow_duplicate_keys
    reader.preserve_quotes, reader.width = True, 4096
    dash = re.search(r"^( *)- ", text, re.M)
    offset = len(dash[1]) if dash else 2
    inner = re.search(r"^( +)[\w]", text, re.M)
    reader.indent(mapping=len(inner[1]) if inner else 2, sequence=offset + 2, offset=offset)
    return reader


def read_yaml(path: str | os.PathLike[str]) -> Document:
    """A YAML file with the line of each key."""
    place, text = Path(path), text_of(path)
    values = loaded(text, path)
    if values is None:
        raise ValueError(f"{place} is empty: an Axolotl run needs base_model, datasets and learning_rate at least.")
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import YAMLError

    twice = ("", 0)
    try:
        tree = _round_trip(text).load(text)
    except DuplicateKeyError as error:
        key = re.search(r'duplicate key "(.*?)"', str(error))
        tree = _round_trip(allow_duplicate_keys=True).load(text)
        twice = (key[1] if key else "", error.problem_mark.line + 1)
    except (YAMLError, ValueError):  # YAML 1.2 knows other words than 1.1: no lines then
        tree = None
    return Document(values, tree, text, twice, place)


def text_of(path: str | os.PathLike[str]) -> str:
    """A YAML file's text. Raises ValueError, in one sentence, where it cannot be read."""
    place = Path(path)
    if place.is_dir():
        raise ValueError(f"{place} is a folder: give the YAML file itself.")
    try:
        if place.stat().st_size > MOST:
            raise ValueError(f"{place} has {place.stat().st_size / 2**20:,.0f} MiB: that is no configuration.")
        return place.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{place} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{place} is no text file: a YAML is UTF-8.") from None


def loaded(text: str, name: Any) -> dict[str, Any] | None:
    """A YAML text's mapping, None where it is empty; `name` says in an error which one it was."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is no YAML: {_where(error, text)}.") from None
    except (RecursionError, ValueError, OverflowError, KeyError) as error:  # a date of month 13, 1,000 brackets
        raise ValueError(f"{name} cannot be read as YAML: {str(error) or type(error).__name__}.") from None
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{name} holds a {type(values).__name__}, and a configuration is lines of `key: value`.")
    return values


def written_number(text: str) -> str:
    """1e3 as 1000 and 1e-4 as 1.0e-4, which YAML 1.1 takes for numbers."""
    number = float(text)
    if number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    mantissa, _, exponent = text.lower().partition("e")
    if not exponent:
        return text
    sign = "" if exponent.startswith(("-", "+")) else "+"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"


def _exponents(value: Any, path: KeyPath, seen: set[int]) -> Iterator[KeyPath]:
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        yield path
    if isinstance(value, Mapping | list) and id(value) not in seen:  # an alias may lead here again, and in circles
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _exponents(item, (*path, key), seen)


def _where(error: yaml.YAMLError, text: str) -> str:
    """Line, column and what is wrong there."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:  # a character: its place in the text is all that PyYAML says
        before = text[: getattr(error, "position", 0)]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        return f"line {line}, column {column}: a character that YAML does not allow"
    problem = error.problem or error.context or "it does not parse"
    if "cannot start any token" in problem and "\\t" in problem:
        problem = "a tab, where YAML is indented by spaces"
    elif "mapping values are not allowed here" in problem:
        problem = "a second colon on the line, or a line that is indented too far"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
