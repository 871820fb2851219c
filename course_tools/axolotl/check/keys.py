"""Every key of a YAML held against Axolotl's schema: unknown ones, which Axolotl reads past, and wrong types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from course_tools.axolotl.check.findings import Finding, dotted, nearest
from course_tools.axolotl.check.kinds import Mismatch, accepted, expected, options
from course_tools.axolotl.check.schema import stored
from course_tools.axolotl.check.yaml_lines import Document, KeyPath

REMOVED = {"fsdp"}  # rules_sharding speaks of it
FSDP1 = ("sharding_strategy", "forward_prefetch", "sync_module_states", "backward_prefetch", "backward_prefetch_policy",
         "limit_all_gathers", "use_orig_params")  # fmt: skip
PREFERENCE = {"dpo": "DPODataset", "ipo": "DPODataset", "simpo": "DPODataset", "kto": "KTODataset"}


def cleaned(document: Document) -> tuple[dict[str, Any], list[Finding]]:
    """The values as Axolotl would take them, without those that it would refuse, and a finding for each of those."""
    return _Reader(document).read()


class _Reader:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.config = stored()["config"]
        self.defs = self.config["$defs"]
        self.findings: list[Finding] = []

    def read(self) -> tuple[dict[str, Any], list[Finding]]:
        values: dict[str, Any] = {}
        known = self.config["properties"]
        for key, value in self.document.values.items():
            if not isinstance(key, str):
                self._say("error", (str(key),), f"{key!r} is no name of a key.", "write the key as a word")
            elif key in REMOVED:
                continue
            elif key in known:
                self._take(values, key, value, known[key], (key,))
            else:
                self._unknown(key, (key,), set(known), top=True)
        for key in self.config["required"]:
            if self.document.values.get(key) is None:
                self._say("error", (key,), f"{key} is missing: Axolotl will not start without it.", f"add `{key}: …`")
        for path, earlier in self.document.duplicates:
            self._say(
                "error", path, f"The key stands there twice (line {earlier} too): the last one counts, without a word.",
                "keep one of the two",
            )  # fmt: skip
        return values, self.findings

    def _take(self, into: dict[str, Any], key: str, value: Any, schema: dict[str, Any], path: KeyPath) -> None:
        """`value` under `key`, if the schema takes it."""
        if value is None:  # Axolotl leaves out what is null, but for the few keys that must have a value
            if options(schema, self.defs) and not any(one.get("type") == "null" for one in options(schema, self.defs)):
                self._wrong(path, value, schema)
            return
        for taken in self._value(value, schema, path):
            into[key] = taken

    def _value(self, value: Any, schema: dict[str, Any], path: KeyPath) -> Iterator[Any]:
        """The value as it is taken; nothing after a finding."""
        alternatives = options(schema, self.defs)
        if isinstance(value, dict) and (alternatives and any(_object(one) for one in alternatives)):
            yield self._mapping(value, [one for one in alternatives if _object(one)], path)
        elif isinstance(value, list) and any(one.get("type") == "array" for one in alternatives):
            yield from self._list(value, [one for one in alternatives if one.get("type") == "array"], schema, path)
        elif not alternatives:
            yield value
        else:
            try:
                yield accepted(value, schema, self.defs)
            except Mismatch:
                self._wrong(path, value, schema)

    def _list(
        self, value: list[Any], alternatives: list[dict[str, Any]], schema: dict[str, Any], path: KeyPath
    ) -> Iterator[Any]:
        one = alternatives[0]
        if len(value) < one.get("minItems", 0):
            self._say(
                "error",
                path,
                "The list is empty.",
                "list at least one" if path[0] != "datasets" else "list one dataset",
            )
            return
        items = self._items(one.get("items", {}), path)
        taken = []
        for index, item in enumerate(value):
            taken.extend(self._value(item, items, (*path, index)))
        yield taken

    def _items(self, items: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        """Which of the kinds of a dataset is meant, as Axolotl decides it."""
        if path == ("datasets",):
            name = PREFERENCE.get(str(self.document.values.get("rl")), "SFTDataset")
            if self.document.values.get("process_reward_model"):
                name = "StepwiseSupervisedDataset"
            return {"anyOf": [{"$ref": f"#/$defs/{one}"} for one in (name, "SyntheticDataset")]}
        return items

    def _mapping(self, value: dict[str, Any], alternatives: list[dict[str, Any]], path: KeyPath) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for one in alternatives:
            named = one.get("properties", {}) | named
        free = [one["additionalProperties"] for one in alternatives if one.get("additionalProperties")]
        if path[0] == "datasets" and value.get("type") != "_synthetic":
            named = {key: one for key, one in named.items() if key in alternatives[0].get("properties", {})}
        taken: dict[str, Any] = {}
        for key, item in value.items():
            here = (*path, str(key))
            if key in named:
                self._take(taken, key, item, named[key], here)
            elif free:
                if isinstance(free[0], dict):
                    self._take(taken, key, item, free[0], here)
                else:
                    taken[key] = item
                    self._exponents(item, here)
            elif path == ("fsdp_config",) and _fsdp1(str(key)):
                plain = str(key).removeprefix("fsdp_")
                if plain in named:
                    self._take(taken, plain, item, named[plain], here)
            else:
                self._unknown(str(key), here, set(named), top=False)
        return taken

    def _exponents(self, value: Any, path: KeyPath) -> None:
        """Numbers that stay text, in a mapping of which Axolotl checks no types."""
        for inner in [path, *(one for one in self.document.plain_strings if one[: len(path)] == path and one != path)]:
            if inner in self.document.plain_strings:
                self._say(
                    "error", inner, f"YAML 1.1 reads {self._raw(inner)!r} as text, not as a number, and nothing converts it here.",
                    f"write {dotted_number(self._raw(inner))}",
                )  # fmt: skip

    def _raw(self, path: KeyPath) -> str:
        value: Any = self.document.values
        for step in path:
            value = value[step]
        return str(value)

    def _unknown(self, key: str, path: KeyPath, known: set[str], *, top: bool) -> None:
        plugin = stored()["plugins"].get(key) if top else None
        loaded = [str(one) for one in self.document.values.get("plugins") or []]
        if plugin:
            if not any(one.rpartition(".")[2] == plugin.rpartition(".")[2] for one in loaded):
                self._say(
                    "error", path, "The key belongs to a plugin that the YAML does not load: it changes nothing.",
                    f"add {plugin} to plugins",
                )  # fmt: skip
            return
        near = nearest(key, known)
        foreign = [one for one in loaded if top and not one.startswith(("axolotl.", "course_lib.", "course_tools."))]
        if near:
            fix = f"write {near}"
        elif top and (section := self._section_with(key)):
            near, fix = section, f"put it into {section}"
        elif not top and key in self.config["properties"]:
            near, fix = key, "put it at the top level"
        else:
            fix = "leave it out, or look its name up"
        what = f"Axolotl knows no such key{'' if top else ' here'} and reads past it without a word"
        doubt = f" (unless {' or '.join(foreign)} brings it)" if foreign else ""
        self._say("warning" if foreign else "error", path, f"{what}{doubt}.", fix)

    def _section_with(self, key: str) -> str:
        for section, name in (
            ("fsdp_config", "FSDPConfig"),
            ("datasets", "SFTDataset"),
            ("special_tokens", "SpecialTokensConfig"),
        ):
            if key in self.defs[name]["properties"] and key not in ("type", "path"):
                return section
        return ""

    def _wrong(self, path: KeyPath, value: Any, schema: dict[str, Any]) -> None:
        asked = expected(schema, self.defs)
        key = path[-1] if isinstance(path[-1], str) else path[-2]
        if isinstance(value, bool) and "text" in asked:
            word = "no" if value is False else "yes"
            sentence = f"YAML reads a bare `{word}`, `{'off' if value is False else 'on'}` or `{str(value).lower()}` as {str(value).lower()}, and this key takes text."
            fix = f'write {key}: "{word}"'
        elif path in self.document.plain_strings:
            sentence, fix = (
                f"YAML 1.1 reads {value!r} as text, and this key takes {asked}.",
                f"write {_plain_number(value)}",
            )
        elif isinstance(value, int | float) and asked == "text":
            sentence, fix = f"This key takes text, and {value} is a number.", f'write {key}: "{value}"'
        else:
            near = nearest(
                str(value), [str(each) for one in options(schema, self.defs) for each in one.get("enum", [])]
            )
            sentence = f"This key takes {asked}, not {_shown(value)}."
            fix = f"write {near}" if near else f"give {asked}"
        self._say("error", path, sentence, fix)

    def _say(self, level: str, path: KeyPath, sentence: str, fix: str = "") -> None:
        self.findings.append(Finding(level, dotted(path), self.document.line(*path), sentence, fix))


def _object(one: dict[str, Any]) -> bool:
    return "properties" in one or one.get("type") == "object"


def _fsdp1(key: str) -> bool:
    plain = key.removeprefix("fsdp_")
    return plain in FSDP1 or key.startswith("fsdp_") or key == "version"


def _shown(value: Any) -> str:
    return {"dict": "a mapping", "list": "a list", "NoneType": "nothing"}.get(type(value).__name__, repr(value))


def dotted_number(raw: str) -> str:
    """1e-4 as 1.0e-4, which YAML 1.1 takes for a number."""
    mantissa, _, exponent = raw.lower().partition("e")
    sign = "" if exponent.startswith(("-", "+")) else "+"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"


def _plain_number(raw: str) -> str:
    """1e3 as 1000 where it is whole."""
    number = float(raw)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else dotted_number(raw)
