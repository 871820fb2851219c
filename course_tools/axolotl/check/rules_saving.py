"""What is written, when, and whether a run can go on from it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding, nearest

STRATEGIES = ("no", "epoch", "steps", "best")


def rules(facts: Facts) -> Iterator[Finding]:
    """Findings about checkpoints, the last step, resuming and the output folder."""
    yield from _words(facts)
    yield from _checkpoints(facts)
    yield from _last_weights(facts)
    yield from _resuming(facts)
    yield from _output(facts)


def when(facts: Facts) -> tuple[str, int | None]:
    """ "no", "epoch", "steps", "best", and steps between two checkpoints where they are known.

    As Axolotl's `normalize_config` and `_configure_save_and_eval_strategy` decide it: steps win over every strategy,
    saves_per_epoch becomes a share of the run if that is below 1, and a 0 there counts as unset. The strategy "steps"
    saves the last step, too, wherever it falls.
    """
    every = facts.given("save_steps") or None
    saves, epochs = facts.given("saves_per_epoch"), float(facts.get("num_epochs") or 1)
    if saves and saves * epochs > 1:
        every = 1 / (saves * epochs)
    if every:
        total = facts.batch.total_steps
        if every < 1:
            return "steps", math.ceil(every * total) if total else None
        return "steps", int(every)
    strategy = facts.given("save_strategy") or "epoch"
    return strategy, 500 if strategy == "steps" else None  # transformers' own default


def _words(facts: Facts) -> Iterator[Finding]:
    strategy, steps = facts.given("save_strategy"), facts.given("save_steps")
    if strategy is not None and strategy not in STRATEGIES:
        near = nearest(strategy, STRATEGIES, 0.5)
        yield facts.error(
            "save_strategy",
            f"{strategy!r} is none of {', '.join(STRATEGIES)}; transformers refuses it.",
            f"write {near}" if near else "",
        )
    elif strategy and steps and strategy != "steps":
        yield facts.error(
            "save_steps",
            f"save_steps does not go with save_strategy: {strategy}, and Axolotl refuses.",
            "leave one of them out",
        )
    if facts.given("saves_per_epoch") and steps:
        yield facts.error(
            "saves_per_epoch", "save_steps and saves_per_epoch are both set, and Axolotl refuses.", "keep one"
        )
    if strategy == "no" and when(facts)[0] == "steps" and not steps:
        yield facts.warning(
            "save_strategy", "saves_per_epoch wins over it: there will be checkpoints.", "leave one of the two out"
        )
    if facts.given("saves_per_epoch") == 0 and strategy != "no" and not steps:
        yield facts.warning(
            "saves_per_epoch", "A 0 switches nothing off: it counts as unset, and every epoch is saved.",
            'write save_strategy: "no" for no checkpoints',
        )  # fmt: skip


def _checkpoints(facts: Facts) -> Iterator[Finding]:
    strategy, every = when(facts)
    total, batch = facts.batch.total_steps, facts.batch
    key = "save_strategy" if facts.given("save_strategy") else ""
    if strategy == "no":
        yield facts.warning(
            key,
            "No checkpoint is ever written, not of the last step either: a run that dies leaves nothing, one that ends well "
            "leaves weights without the optimizer's state.",
            "give save_steps or saves_per_epoch",
        )
    elif strategy == "best":
        yield facts.warning(
            key, "Only steps that improve the metric become checkpoints: the last step is saved as one by luck.",
            "take save_strategy: steps to be able to resume",
        )  # fmt: skip
    elif strategy == "steps" and every and total and every >= total:
        yield facts.warning(
            "save_steps" if facts.given("save_steps") else key,
            f"The first checkpoint is due after {every} steps, and the run has {total}: there is one at the very end only.",
            f"write save_steps: {max(1, total // 4)}, say",
        )
    elif strategy == "epoch" and total and batch.steps_per_epoch and total < batch.steps_per_epoch:
        yield facts.say(
            "note", key, f"Saved once an epoch, and the run ends within the first ({total} of {batch.steps_per_epoch} steps): "
            "one checkpoint, at the end.",
        )  # fmt: skip


def _last_weights(facts: Facts) -> Iterator[Finding]:
    """Axolotl writes the trained weights to output_dir when a run ends, but not under every sharding."""
    settings, fsdp = facts.settings, facts.settings.fsdp
    strategy, _ = when(facts)
    if fsdp and not settings.adapter and not fsdp.get("final_state_dict_type"):
        kind, path = fsdp.get("state_dict_type"), ("fsdp_config", "state_dict_type")
        if kind == "SHARDED_STATE_DICT" and strategy == "no":
            yield facts.error(
                path,
                "The final weights are merged from the last checkpoint, and save_strategy is no: they are never written.",
                "add final_state_dict_type: FULL_STATE_DICT",
            )
        elif kind == "SHARDED_STATE_DICT" and strategy == "best":
            yield facts.warning(
                path, "The final weights are merged from the last checkpoint, which need not be the last step.",
                "add final_state_dict_type: FULL_STATE_DICT",
            )  # fmt: skip
    if fsdp and fsdp.get("state_dict_type") == "SHARDED_STATE_DICT" and facts.given("save_only_model"):
        yield facts.error(
            "save_only_model",
            "transformers refuses it under SHARDED_STATE_DICT.",
            "write state_dict_type: FULL_STATE_DICT",
        )
    gather = settings.zero.get("stage3_gather_16bit_weights_on_model_save")
    if settings.strategy == "zero3" and not gather and not settings.adapter:
        yield facts.warning(
            "deepspeed",
            "stage3_gather_16bit_weights_on_model_save is not on: what is saved are ZeRO's shards, which no from_pretrained reads.",
            "set it to true, or run zero_to_fp32.py afterwards",
        )


def _resuming(facts: Facts) -> Iterator[Finding]:
    given, auto = facts.given("resume_from_checkpoint"), facts.given("auto_resume_from_checkpoints")
    strategy, _ = when(facts)
    if given and not os.path.isdir(facts.settings.folder / given):
        yield facts.error(
            "resume_from_checkpoint", f"There is no folder {given} to go on from.", "name a checkpoint-N folder"
        )
    if given and auto:
        yield facts.warning(
            "auto_resume_from_checkpoints",
            "resume_from_checkpoint wins: a restart goes back to it each time, not to the newest checkpoint.",
            "leave resume_from_checkpoint out",
        )
    if auto and strategy == "no":
        yield facts.error(
            "auto_resume_from_checkpoints",
            "There will be no checkpoint to resume from.",
            "give save_steps or saves_per_epoch",
        )
    if facts.given("save_only_model") and (auto or given):
        yield facts.error(
            "save_only_model", "Checkpoints without the optimizer's state: a resumed run starts Adam from nothing.",
            "write save_only_model: false",
        )  # fmt: skip
    output = facts.settings.folder / str(facts.get("output_dir"))
    if not auto and not given and os.path.isdir(output) and any(output.glob("checkpoint-*")):
        yield facts.warning(
            "output_dir", "Checkpoints of an earlier run lie there, and this one starts from nothing beside them.",
            "write auto_resume_from_checkpoints: true, or another output_dir",
        )  # fmt: skip


def _output(facts: Facts) -> Iterator[Finding]:
    if "output_dir" not in facts.settings.values:
        yield facts.warning(
            "output_dir", "Not given: every run writes to ./model-out, over the one before.", "name a folder"
        )
        return
    place: Path = facts.settings.folder / str(facts.get("output_dir"))
    there = next(one for one in (place, *place.parents) if os.path.exists(one))
    if not os.path.isdir(there):
        yield facts.error("output_dir", f"{there} is a file, so no folder can be made of it.", "name another folder")
    elif not os.access(there, os.W_OK):
        yield facts.error(
            "output_dir", f"{there} may not be written to.", "name another folder, or get the right to write"
        )
