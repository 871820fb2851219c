"""The first lines of a local data set: is it there, what does it hold, how many rows are there."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEEKED = 20  # rows
COUNTED = 256 * 2**20  # bytes: a file that is larger is not read through
LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")

# The columns that a type cannot do without: one of each group. Source: axolotl/prompt_tokenizers.py and prompt_strategies.
COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "alpaca": (("instruction",), ("output",)),
    "alpaca_chat.load_qa": (("question",), ("answer",)),
    "gpteacher": (("instruction",), ("response",)),
    "jeopardy": (("question",), ("category",), ("answer",)),
    "oasst": (("INSTRUCTION",), ("RESPONSE",)),
    "summarizetldr": (("article",), ("summary",)),
    "reflection": (("instruction",), ("output",), ("reflection",), ("corrected",)),
    "input_output": (("segments",),),
}


@dataclass(frozen=True)
class Peek:
    """What a file shows.

    Attributes:
        rows: how many there are; None if it was not counted.
        columns: of the first rows, in every one of them.
        first: the first row. problem: what is wrong with the file, in a sentence; "" if nothing is.
        values: every row, where the file was read through; else the first ones.
    """

    rows: int | None
    columns: frozenset[str] = frozenset()
    first: dict[str, Any] | None = None
    problem: str = ""
    values: tuple[dict[str, Any], ...] = ()


def peek(path: Path) -> Peek:
    """A JSON or JSON-lines file; of other formats only that it is there and not empty."""
    try:
        if path.is_dir():
            return Peek(None) if any(path.iterdir()) else Peek(0, problem=f"{path} is an empty folder.")
        size = path.stat().st_size
        if not size:
            return Peek(0, problem=f"{path} is empty.")
        if not path.name.endswith(LINES):
            return Peek(None)
        return _json(path, size)
    except OSError as error:
        return Peek(None, problem=f"{path} cannot be read: {error.strerror or error}.")
    except UnicodeDecodeError:
        return Peek(None, problem=f"{path} is no text file, and its name says JSON.")
    except EOFError:
        return Peek(None, problem=f"{path} ends in the middle of its compressed data.")


def _json(path: Path, size: int) -> Peek:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        if start == "[" and size > COUNTED:
            return Peek(None)
        if start == "[":
            try:
                return _rows(json.loads("[" + file.read()), path)
            except json.JSONDecodeError as error:
                return Peek(
                    None, problem=f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}."
                )
        found: list[dict[str, Any]] = []
        rows, text = 0, start
        for number, line in enumerate(file, start=1):
            text, line = "", text + line
            if not line.strip():
                continue
            rows += 1
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                if number == 1 and line.strip() == "{":
                    return Peek(
                        None, problem=f"{path} holds one JSON object over many lines: one object a line is needed."
                    )
                return Peek(None, problem=f"{path}, line {number}, is not JSON: {error.msg}.")
            if not isinstance(row, dict):
                return Peek(None, problem=f"{path}, line {number}, holds no object: each row is {{…}}.")
            found.append(row)
            if size > COUNTED and rows >= PEEKED:
                return _of(None, found)
        return _of(rows, found) if rows else Peek(0, problem=f"{path} holds no row.")


def _rows(found: Any, path: Path) -> Peek:
    if not found:
        return Peek(0, problem=f"{path} holds no row.")
    if not all(isinstance(row, dict) for row in found):
        return Peek(None, problem=f"{path} is a list of something else than objects: each row is {{…}}.")
    return _of(len(found), found)


def _of(rows: int | None, found: list[dict[str, Any]]) -> Peek:
    first = found[:PEEKED]
    return Peek(rows, frozenset.intersection(*(frozenset(row) for row in first)), found[0], values=tuple(found))


def missing(dataset: dict[str, Any], found: Peek) -> str:
    """The columns that the type of a data set needs and the file lacks, as a sentence; "" if it has them all."""
    kind = dataset.get("type")
    if (
        found.first is None
        or kind is None
        or (isinstance(kind, str) and ":" in kind and kind.split(":")[0] not in COLUMNS)
    ):
        return ""
    there = ", ".join(sorted(found.columns)) or "none"
    if isinstance(kind, dict):
        needed = [kind.get(name) for name in ("field_instruction", "field_output") if kind.get(name)]
        lacking = [name for name in needed if name not in found.columns]
        return f"field {lacking[0]!r} is not in the file; it has {there}." if lacking else ""
    name = str(kind).split(":")[0]
    if name == "completion":
        column = dataset.get("field") or "text"
        return (
            "" if column in found.columns else f"`type: completion` reads the field {column!r}; the file has {there}."
        )
    if name == "chat_template":
        return _chat(dataset, found, there)
    for group in COLUMNS.get(name, ()):
        if not found.columns & set(group):
            return f"`type: {name}` reads the field {' or '.join(map(repr, group))}; the file has {there}."
    return ""


def _chat(dataset: dict[str, Any], found: Peek, there: str) -> str:
    column = dataset.get("field_messages") or "messages"
    if column not in found.columns:
        return f"`type: chat_template` reads the field {column!r}; the file has {there}."
    messages = found.first[column] if found.first else None
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return f"`type: chat_template` reads a list of messages in {column!r}; the first row has none."
    mapping = {
        "role": dataset.get("message_field_role") or "role",
        "content": dataset.get("message_field_content") or "content",
    }
    mapping |= dataset.get("message_property_mappings") or {}
    lacking = [name for name in (mapping["role"], mapping["content"]) if name not in messages[0]]
    if not lacking:
        return ""
    have = ", ".join(sorted(map(str, messages[0])))
    return f"each message needs {lacking[0]!r}, and the first one has {have} (message_property_mappings renames them)."


def looks_like(columns: frozenset[str]) -> str:
    """The type whose columns these are; "" if none."""
    if {"instruction", "output"} <= columns:
        return "alpaca"
    if columns & {"messages", "conversations"}:
        return "chat_template"
    if "segments" in columns:
        return "input_output"
    return "completion" if "text" in columns else ""
