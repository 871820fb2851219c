"""How the ranks share the model: FSDP that is not there, axes that do not divide, DeepSpeed's JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding

# DeepSpeed's name of what the YAML says already, and the YAML's
MATCHING = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def fsdp(facts: Facts) -> Iterator[Finding]:
    """FSDP without a configuration or without ranks, and a state dict that FSDP2 does not have."""
    section = facts.settings.fsdp
    if facts.given("fsdp_version") and not facts.given("fsdp_config"):
        sentence = "Without fsdp_config there is no FSDP: the run is plain DDP."
        yield facts.warning("fsdp_version", sentence, "add fsdp_config")
    if facts.given("fsdp_config") and facts.settings.cluster and facts.settings.ranks == 1:
        yield facts.warning("fsdp_config", "One rank has nobody to shard with.", "leave it out, or take more cards")
    if section.get("state_dict_type") == "LOCAL_STATE_DICT":
        sentence = "FSDP2 has no LOCAL_STATE_DICT: accelerate refuses when training starts."
        path = ("fsdp_config", "state_dict_type")
        yield facts.warning(path, sentence, "write FULL_STATE_DICT or SHARDED_STATE_DICT")


def axes(facts: Facts) -> Iterator[Finding]:
    """Tensor and context parallelism that do not divide the ranks or the heads."""
    settings, shape = facts.settings, facts.prediction.shape
    tensor, context = settings.tensor_parallel, settings.context_parallel
    if settings.cluster and settings.ranks % (tensor * context):
        key = "tensor_parallel_size" if tensor > 1 else "context_parallel_size"
        sentence = f"{tensor} x {context} ranks on a sequence do not divide {settings.ranks} ranks."
        yield facts.error(key, sentence, "take sizes whose product divides the ranks")
    if shape and (shape.heads % tensor or (shape.kv_heads % tensor and tensor % shape.kv_heads)):
        sentence = f"{shape.heads} heads and {shape.kv_heads} key-value heads do not divide by {tensor}."
        yield facts.error("tensor_parallel_size", sentence, f"take a divisor of {shape.kv_heads}")


def deepspeed(facts: Facts) -> Iterator[Finding]:
    """DeepSpeed's configuration: a file that cannot be read, or numbers that contradict the YAML."""
    given, file, settings = facts.given("deepspeed"), facts.settings.deepspeed_file, facts.settings
    if not given:
        return
    if file is not None and (problem := _unreadable(facts, file)):
        yield problem
        return
    config = settings.deepspeed
    name = f"{given}: " if isinstance(given, str) else ""
    for key in ("zero_optimization", "bf16", "fp16"):
        if not isinstance(config.get(key, {}), dict):
            sentence = f'{name}"{key}" in DeepSpeed\'s configuration is an object.'
            yield facts.error("deepspeed", sentence, f'write "{key}": {{…}}')
    stage = settings.zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        sentence = f"{name}ZeRO has the stages 0, 1, 2 and 3, and {stage!r} is none."
        yield facts.error("deepspeed", sentence, "give one of them")
    elif stage == 0:
        sentence = f"{name}stage 0 shards nothing: it is DDP."
        yield facts.warning("deepspeed", sentence, "name a stage of 1, 2 or 3")
    if settings.section("zero_optimization", "offload_param").get("device") in ("cpu", "nvme") and stage != 3:
        sentence = f"{name}offload_param needs stage 3, and this is stage {stage}."
        yield facts.error("deepspeed", sentence, "leave it out")
    yield from _contradictions(facts, name)


def _contradictions(facts: Facts, name: str) -> Iterator[Finding]:
    settings = facts.settings
    auto = {"train_batch_size": "auto"} | dict.fromkeys(MATCHING, "auto") | settings.deepspeed
    for theirs, ours in MATCHING.items():
        if auto[theirs] not in ("auto", settings.number(ours)):
            sentence = f"{name}{theirs} is {auto[theirs]!r}, and {ours} is {settings.number(ours)}."
            yield facts.error("deepspeed", sentence, f'write "{theirs}": "auto"')
    whole = auto["train_batch_size"]
    if settings.cluster and whole not in ("auto", facts.batch.global_batch):
        sentence = f"{name}train_batch_size is {whole!r}, and the YAML makes it {facts.batch.global_batch}."
        yield facts.error("deepspeed", sentence, 'write "train_batch_size": "auto"')
    enabled = {kind: settings.section(kind).get("enabled", "auto") for kind in ("bf16", "fp16")}
    if enabled["bf16"] is True and enabled["fp16"] is True:
        sentence = f"{name}bf16 and fp16 are both enabled."
        yield facts.error("deepspeed", sentence, 'write "enabled": "auto" in both')
        return
    for kind, value in enabled.items():
        if value not in ("auto", settings.precision == kind):
            sentence = f"{name}{kind} is {'on' if value else 'off'}, and the YAML trains in {settings.precision}."
            yield facts.error("deepspeed", sentence, f'write "{kind}": {{"enabled": "auto"}}')


def _unreadable(facts: Facts, file: Path) -> Finding | None:
    """A finding if the JSON cannot be read."""
    name = facts.given("deepspeed")
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        document = facts.settings.document.path
        fix = "give its path from the folder that axolotl is started in"
        if document and os.path.isfile(document.parent / name):
            fix = f"it lies beside the YAML, and paths count from the working directory: start axolotl in {document.parent}"
        return facts.error("deepspeed", f"{name} cannot be read: {error.strerror}.", fix)
    except UnicodeDecodeError:
        return facts.error("deepspeed", f"{name} is no text file.", "give DeepSpeed's JSON")
    except json.JSONDecodeError as error:
        sentence = f"{name} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}."
        return facts.error("deepspeed", sentence, "mend the file")
    if not isinstance(read, dict):
        return facts.error("deepspeed", f"{name} holds no object.", "write {…}")
    return None


RULES = (fsdp, axes, deepspeed)
