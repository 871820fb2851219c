"""The shapes of well-known models, as their published configuration files give them; and of any other model.

`presets.json` holds the values of each model's config.json that its shape depends on, under the names they have there, and the
model's names on the Hugging Face hub (of GPT-3 and the Megatron papers' models: table 1 of arXiv:2104.04473 and table 3 of
arXiv:2205.05198). `shape_of` takes any of those names, a folder, a file, widths, or a transformers configuration or model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from course_lib.memory.architectures import read_config
from course_lib.memory.shapes import Shape
from course_lib.validation import did_you_mean

_READ = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
HUB_NAMES: dict[str, list[str]] = {name: values.get("hub", []) for name, values in _READ.items()}
PRESETS: dict[str, Shape] = {name: read_config(values, name) for name, values in _READ.items()}
ALIASES = {
    "gpt-3": "gpt3-175b",
    "gpt-3-175b": "gpt3-175b",
    "megatron-1t": "megatron-1008b",
    "gpt-1t": "megatron-1008b",
}
_ENDINGS = r"([-_](instruct|base|hf|chat|it|pt|unsloth|bnb-4bit|bf16))+$"  # of one model's variants, widths unchanged


def shape_of(model: str | Shape | Mapping[str, Any] | Any) -> Shape:
    """The shape of a model.

    Args:
        model: a preset's name ("llama-3.1-8b"), its name on the hub (case and organisation do not matter), any other name on
            the hub ("org/model", from the local cache or, where it can be reached, from the hub), a folder with config.json,
            such a file or its content, a mapping of :class:`Shape`'s fields, or a transformers configuration or model.

    Raises:
        ValueError: what it is that cannot be read, in one sentence, with the nearest names that are known.
    """
    if isinstance(model, Shape):
        return model
    if isinstance(model, str):
        return _named(model)
    if isinstance(model, os.PathLike):
        return _from_path(Path(model), os.fspath(model))
    if isinstance(model, Mapping):
        return read_config(model) if "model_type" in model else _from_widths(model)
    config = getattr(model, "config", model)
    if not hasattr(config, "model_type") or not hasattr(config, "to_dict"):
        raise ValueError(f"No model can be read from {type(model).__name__}: give a preset's name, a config or widths.")
    return read_config(config.to_dict(), getattr(config, "_name_or_path", ""))


def written_shape(text: str) -> Shape:
    """The shape behind what a command line says: any name that `shape_of` takes, or widths as layers=2,hidden=64,…"""
    if "=" not in text or os.path.exists(text):
        return shape_of(text)
    widths: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        flag = {"true": True, "false": False}.get(value.strip().lower())
        if flag is None and not value.strip().isdecimal():
            raise ValueError(f"--model {item.strip()}: give a width as name=number, or name=true for a property.")
        widths[name.strip()] = int(value) if flag is None else flag
    return shape_of(widths)


def _from_widths(widths: Mapping[str, Any]) -> Shape:
    known = [field.name for field in fields(Shape)]
    if unknown := sorted(set(widths) - set(known)):
        near = did_you_mean(unknown[0], known, cutoff=0.6)
        raise ValueError(f"A shape has no {unknown[0]!r}" + (f": did you mean {near[0]!r}?" if near else "."))
    missing = [name for name in ("layers", "hidden", "heads", "vocab") if name not in widths]
    if missing:
        raise ValueError(f"A shape needs layers, hidden, heads and vocab: {missing[0]} is missing.")
    return Shape(**widths)


@cache
def _tails() -> dict[str, str]:
    """Preset's name behind each name that it has, in small letters, without organisation and ending."""
    names = {name: [name, *(hub.rpartition("/")[2] for hub in hubs)] for name, hubs in HUB_NAMES.items()}
    return {re.sub(_ENDINGS, "", each.lower()): name for name, several in names.items() for each in several} | ALIASES


def _named(name: str) -> Shape:
    text = name.strip()
    organisation, _, tail = text.lower().rpartition("/")
    preset = _tails().get(re.sub(_ENDINGS, "", tail))
    path = Path(text).expanduser()
    if preset and (not organisation or (HUB_NAMES[preset] and not path.exists())):
        return PRESETS[preset]
    if not text:
        raise ValueError("No model is named: give a preset's name, a name on the hub, a folder or widths.")
    if path.is_dir() or path.is_file() or text.endswith(".json") or text.startswith(("/", ".", "~")):
        return _from_path(path, text)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return _from_hub(text)
    raise ValueError(f"No model is called {name!r}: {_nearest(tail)}")


def _nearest(tail: str) -> str:
    near = did_you_mean(re.sub(_ENDINGS, "", tail.lower()), _tails(), most=3, cutoff=0.4)
    known = dict.fromkeys(_tails()[each] for each in near) or ["llama-3.1-8b", "qwen3-0.6b"]
    return f"the nearest are {', '.join(known)}. A folder with config.json or widths will do too."


def _from_path(path: Path, text: str) -> Shape:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is a folder without config.json" if path.is_dir() else "is not there"
        raise ValueError(f"{text} {what}: give a model's folder, its config.json or a name.") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no object, as a model's config.json does.")
    return read_config(values, path.resolve().name if path.is_dir() else file.resolve().parent.name)


@cache
def _from_hub(name: str) -> Shape:
    """A model that is no preset, by its config.json in the local cache or on the hub."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import build_hf_headers

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            text = Path(cached).read_text(encoding="utf-8")
        elif constants.HF_HUB_OFFLINE:
            raise OSError
        else:  # one try: the hub's own download tries for half a minute where there is no network
            with urlopen(Request(hf_hub_url(name, "config.json"), headers=build_hf_headers()), timeout=3) as answer:
                text = answer.read().decode("utf-8")
        values = json.loads(text)
    except (OSError, ValueError, HFValidationError):  # not there, not allowed, no network, or no JSON
        raise ValueError(
            f"{name} is no preset, and its config.json is neither in the local cache nor to be had from the hub; "
            + _nearest(name.rpartition("/")[2])
        ) from None
    return read_config(values, name)
