"""The process in which Axolotl's own validator stays loaded: one question a line on stdin, one answer a line on stdout.

Started by `validator`. It ends when its stdin is closed, so it never outlives the program that asks.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import typing
from collections.abc import Iterator
from typing import Any

from course_lib.validation import did_you_mean

MAYBE = 0.7  # how alike two names must be for one to be offered in place of the other


def answer(values: dict[str, Any], capabilities: dict[str, Any]) -> dict[str, Any]:
    """What Axolotl says about a YAML's values on such cards. Imports Axolotl.

    Returns:
        "refusals": [{"path", "words"}]; "warnings": lines of its log; "plugins": those that cannot be loaded, with the
        reason; "unknown": keys that Axolotl reads past (see `unknown_keys`); "names": optimizers and schedulers that
        do not exist, with what was probably meant.
    """
    import torch
    from axolotl.integrations.base import PluginManager, normalize_plugin_name
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault
    from pydantic import ValidationError

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    PluginManager._instance = None  # or the plugins of the last YAML would bring their keys to this one
    manager = PluginManager.get_instance()
    config, failed, refusals = DictDefault(values), {}, []
    named = values.get("plugins")
    for name in map(normalize_plugin_name, map(str, named if isinstance(named, list) else [])):
        try:
            manager.register(name, required=True)
            manager.plugins[name].register(config)
        except Exception as error:  # a plugin may raise anything, and what it raises is the answer
            failed[name] = f"{type(error).__name__}: {error}"
            manager.plugins.pop(name, None)
    model = merge_input_args()[1]
    logging.getLogger("axolotl").addHandler(handler)
    try:
        environment = {"torch_version": torch.__version__.split("+")[0]}
        validate_config(config, capabilities=capabilities, env_capabilities=environment)
    except ValidationError as error:
        refusals = [{"path": list(one["loc"]), "words": one["msg"]} for one in error.errors()]
    except Exception as error:  # validators of Axolotl raise what they like: an OSError for a missing JSON, a TypeError
        refusals = [{"path": [], "words": f"{type(error).__name__}: {error}"}]
    finally:
        logging.getLogger("axolotl").removeHandler(handler)
    return {
        "refusals": refusals,
        "warnings": list(dict.fromkeys(lines)),
        "plugins": failed,
        "unknown": list(unknown_keys(values, [model])),
        "names": wrong_names(values),
    }


def unknown_keys(values: dict[str, Any], models: list[Any], path: tuple[Any, ...] = ()) -> Iterator[dict[str, Any]]:
    """The keys that no model has: {"path", "null", "near": a key that looks like it, "section": where a key of this name belongs, "" for the top level, or None}."""
    fields: dict[str, Any] = {}
    for model in models:
        for name, field in model.model_fields.items():
            fields |= dict.fromkeys({name, field.alias or name}, field)
    for key, value in values.items():
        field = fields.get(key) or (fields.get(str(key).removeprefix("fsdp_")) if path == ("fsdp_config",) else None)
        if field is not None:
            inner, free = _models(field.annotation)
            items = [((key,), value)] if isinstance(value, dict) else []
            items += [((key, i), one) for i, one in enumerate(value if isinstance(value, list) else [])]
            for where, one in items:
                if inner and not free and isinstance(one, dict):
                    yield from unknown_keys(one, inner, (*path, *where))
        elif not any(model.model_config.get("extra") == "allow" for model in models):
            near = did_you_mean(key, fields, cutoff=MAYBE)
            found = {"path": [*path, key], "null": value is None, "near": near[0] if near else "", "section": None}
            if path:
                top = _top_level()
                found["section"] = "" if key in top else None
            else:
                sections = (
                    name
                    for name, one in fields.items()
                    for model in _models(one.annotation)[0]
                    if key in model.model_fields
                )
                found["section"] = next(sections, None)
            yield found


def _top_level() -> dict[str, Any]:
    from axolotl.utils.schemas.config import AxolotlInputConfig

    return AxolotlInputConfig.model_fields


def _models(annotation: Any) -> tuple[list[Any], bool]:
    """The pydantic models inside an annotation, and whether it takes any mapping beside them."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    if annotation in (dict, Any) or typing.get_origin(annotation) is dict:
        return [], True
    inside = [_models(one) for one in typing.get_args(annotation)]
    return [model for models, _ in inside for model in models], any(free for _, free in inside)


def wrong_names(values: dict[str, Any]) -> list[dict[str, str]]:
    """Names that Axolotl's schema takes as text and that the trainer would look up in vain."""
    from axolotl.utils.schemas.enums import CustomSupportedOptimizers
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    known = {
        "optimizer": [one.value for one in (*OptimizerNames, *CustomSupportedOptimizers)],
        "lr_scheduler": [*(one.value for one in SchedulerType), "one_cycle", "rex"],
    }
    return [
        {"key": key, "near": next(iter(did_you_mean(values[key], names)), "")}
        for key, names in known.items()
        if isinstance(values.get(key), str) and values[key] not in names
    ]


def main() -> None:
    """Answer until stdin is closed. What Axolotl prints goes nowhere: the answers have stdout to themselves."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    questions: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            questions.put(line)
        os._exit(0)  # the asking program closed the pipe, or is gone: end, in the middle of an import too

    threading.Thread(target=read, daemon=True).start()
    try:
        import axolotl.utils.config as config_module
        from axolotl.integrations.base import PluginManager

        merge, merged = config_module.merge_input_args, {}

        def merge_once() -> Any:
            """pydantic takes a fifth of a second to build Axolotl's schema: once for each set of plugins is enough."""
            key = tuple(PluginManager.get_instance().get_input_args())
            if key not in merged:
                merged[key] = merge()
            return merged[key]

        config_module.merge_input_args = merge_once
        answer({"base_model": "x"}, {"n_gpu": 1})
        reply: dict[str, Any] = {"ready": True}
    except Exception as error:  # whatever stops the import is told to the program that asked
        reply = {"failed": f"{type(error).__name__}: {error}"}
    while True:
        print(json.dumps(reply, default=str), file=answers, flush=True)
        question = json.loads(questions.get())
        os.chdir(question["folder"])
        reply = answer(question["values"], question["capabilities"])


if __name__ == "__main__":
    main()
