"""What is written, when, and whether a run can go on from it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from course_lib.validation import did_you_mean
from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding

STRATEGIES = ("no", "epoch", "steps", "best")
GATHER = "gather_16bit_weights_on_model_save"  # DeepSpeed reads it with and without the prefix


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


def words(facts: Facts) -> Iterator[Finding]:
    """Settings of saving that mean something else than they seem to."""
    strategy, steps = facts.given("save_strategy"), facts.given("save_steps")
    if strategy is not None and strategy not in STRATEGIES:
        sentence = f"{strategy!r} is none of {', '.join(STRATEGIES)}; transformers refuses it."
        near = did_you_mean(strategy, STRATEGIES)
        yield facts.warning("save_strategy", sentence, f"write {near[0] if near else 'one of them'}")
    if strategy == "no" and when(facts)[0] == "steps" and not steps:
        sentence = "saves_per_epoch wins over it: there will be checkpoints."
        yield facts.warning("save_strategy", sentence, "leave one of the two out")
    if facts.given("saves_per_epoch") == 0 and strategy != "no" and not steps:
        sentence = "A 0 switches nothing off: it counts as unset, and every epoch is saved."
        yield facts.warning("saves_per_epoch", sentence, 'write save_strategy: "no" for no checkpoints')


def checkpoints(facts: Facts) -> Iterator[Finding]:
    """Checkpoints that never come, or come too late."""
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
        sentence = "Only steps that improve the metric become checkpoints: the last step is saved as one by luck."
        yield facts.warning(key, sentence, "take save_strategy: steps to be able to resume")
    elif strategy == "steps" and every and total and every >= total:
        yield facts.warning(
            "save_steps" if facts.given("save_steps") else key,
            f"The first checkpoint is due after {every} steps, and the run has {total}: there is one at the very end only.",
            f"write save_steps: {max(1, total // 4)}, say",
        )
    elif strategy == "epoch" and total and batch.steps_per_epoch and total < batch.steps_per_epoch:
        ends = f"the run ends within the first ({total} of {batch.steps_per_epoch} steps)"
        yield facts.say("note", key, f"Saved once an epoch, and {ends}: one checkpoint, at the end.")


def last_weights(facts: Facts) -> Iterator[Finding]:
    """Axolotl writes the trained weights to output_dir when a run ends, but not under every sharding."""
    settings, fsdp = facts.settings, facts.settings.fsdp
    sharded = fsdp.get("state_dict_type") == "SHARDED_STATE_DICT"
    if sharded and not settings.adapter and not fsdp.get("final_state_dict_type"):
        lost = {
            "no": "and save_strategy is no: they are never written.",
            "best": "which need not be the last step.",
        }.get(when(facts)[0])
        if lost:
            sentence = f"The final weights are merged from the last checkpoint, {lost}"
            path = ("fsdp_config", "state_dict_type")
            yield facts.warning(path, sentence, "add final_state_dict_type: FULL_STATE_DICT")
    if sharded and facts.given("save_only_model"):
        sentence = "transformers refuses it under SHARDED_STATE_DICT."
        yield facts.warning("save_only_model", sentence, "write state_dict_type: FULL_STATE_DICT")
    gather = settings.zero.get(f"stage3_{GATHER}") or settings.zero.get(GATHER)
    if settings.strategy == "zero3" and not gather and not settings.adapter:
        yield facts.warning(
            "deepspeed",
            f"stage3_{GATHER} is not on: what is saved are ZeRO's shards, which no from_pretrained reads.",
            "set it to true, or run zero_to_fp32.py afterwards",
        )


def resuming(facts: Facts) -> Iterator[Finding]:
    """Runs that cannot go on, or would start again beside what is there."""
    given, auto = facts.given("resume_from_checkpoint"), facts.given("auto_resume_from_checkpoints")
    if given and not os.path.isdir(facts.settings.folder / given):
        sentence = f"There is no folder {given} to go on from."
        yield facts.error("resume_from_checkpoint", sentence, "name a checkpoint-N folder")
    if given and auto:
        sentence = "resume_from_checkpoint wins: a restart goes back to it each time, not to the newest checkpoint."
        yield facts.warning("auto_resume_from_checkpoints", sentence, "leave resume_from_checkpoint out")
    if auto and when(facts)[0] == "no":
        sentence = "There will be no checkpoint to resume from."
        yield facts.warning("auto_resume_from_checkpoints", sentence, "give save_steps or saves_per_epoch")
    if facts.given("save_only_model") and (auto or given):
        sentence = "Checkpoints without the optimizer's state: a resumed run starts Adam from nothing."
        yield facts.warning("save_only_model", sentence, "write save_only_model: false")
    output = facts.settings.folder / facts.get("output_dir")
    if not auto and not given and os.path.isdir(output) and any(output.glob("checkpoint-*")):
        sentence = "Checkpoints of an earlier run lie there, and this one starts from nothing beside them."
        yield facts.warning("output_dir", sentence, "write auto_resume_from_checkpoints: true, or another output_dir")


def output_folder(facts: Facts) -> Iterator[Finding]:
    """An output folder that is missing from the YAML or cannot be written to."""
    if facts.given("output_dir") is None:
        sentence = "Not given: every run writes to ./model-out, over the one before."
        yield facts.warning("output_dir", sentence, "name a folder")
        return
    place: Path = facts.settings.folder / facts.given("output_dir")
    there = next(one for one in (place, *place.parents) if os.path.exists(one))
    if not os.path.isdir(there):
        yield facts.error("output_dir", f"{there} is a file, so no folder can be made of it.", "name another folder")
    elif not os.access(there, os.W_OK):
        sentence = f"{there} may not be written to."
        yield facts.error("output_dir", sentence, "name another folder, or get the right to write")


RULES = (words, checkpoints, last_weights, resuming, output_folder)
