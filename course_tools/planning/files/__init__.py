"""A plan of `course_tools.planning` as the files that run it: Accelerate, DeepSpeed, torchrun, Axolotl. No PyTorch.

>>> best = plan("llama-3.1-8b", "2x24GiB", global_batch=16, seq_len=2048).plans[0]
>>> targets_of(best)
>>> write(best, "axolotl", "run")     # then: axolotl train run/axolotl.yml ...
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from course_lib.validation import pick
from course_tools.planning.files import accelerate, axolotl, deepspeed, torchrun
from course_tools.planning.files.facts import Refused, refuse_combination

if TYPE_CHECKING:
    from course_tools.planning import Plan

_MODULES: dict[str, ModuleType] = {
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "torchrun": torchrun,
    "axolotl": axolotl,
}
TARGETS = tuple(_MODULES)


def files(plan: Plan, target: str, *, base_model: str | None = None) -> dict[str, str]:
    """The files that run `plan` with `target`, as file name to text; nothing is written or started.

    Args:
        plan: of `course_tools.planning`.
        target: one of `TARGETS`.
        base_model: a folder or a name on the hub for the model; by default the one that the preset was read from.
    """
    try:
        return _texts(plan, target, base_model)
    except Refused as why:
        others = targets_of(plan, base_model=base_model)
        if not others:
            raise ValueError(f"{why}: no target can run it.") from None
        can = " and ".join(filter(None, [", ".join(others[:-1]), others[-1]]))
        raise ValueError(f"{why}: the target{'s' * (len(others) > 1)} {can} can.") from None


def write(plan: Plan, target: str, folder: str | os.PathLike[str], *, base_model: str | None = None) -> list[Path]:
    """Write the files of `target` into `folder`, which is made if need be; returns their paths."""
    texts = files(plan, target, base_model=base_model)
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise ValueError(f"{str(folder)!r} is a file: name a folder for the plan's files.")
    for name, text in texts.items():
        if (place / name).exists() and (place / name).read_text(encoding="utf-8") != text:
            raise ValueError(f"{place / name} is there already, with something else in it: name another folder.")
    place.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")
    return [place / name for name in texts]


def targets_of(plan: Plan, *, base_model: str | None = None) -> tuple[str, ...]:
    """The targets that can express this plan, in the order of `TARGETS`."""
    return tuple(target for target in TARGETS if not why_not(plan, target, base_model=base_model))


def why_not(plan: Plan, target: str, *, base_model: str | None = None) -> str:
    """Why `target` cannot express this plan, in a sentence; empty where it can."""
    try:
        _texts(plan, target, base_model)
    except Refused as why:
        return f"{why}."
    return ""


def _texts(plan: Plan, target: str, base_model: str | None) -> dict[str, str]:
    pick("target", target, TARGETS)
    refuse_combination(plan)
    return _MODULES[target].files(plan, base_model)
