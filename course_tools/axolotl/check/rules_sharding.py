"""How the ranks share the model: FSDP that is not there, axes that do not divide, DeepSpeed's JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from course_lib.choices import Widths, why_not_tensor_parallel
from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding
from course_tools.axolotl.check.settings import Settings

# The optimizers that transformers takes from bitsandbytes
BITSANDBYTES = """adamw_8bit adamw_bnb_8bit paged_adamw_8bit paged_adamw_32bit ademamix ademamix_8bit paged_ademamix_8bit
    paged_ademamix_32bit lion_8bit lion_32bit paged_lion_8bit paged_lion_32bit rmsprop_bnb rmsprop_bnb_8bit
    rmsprop_bnb_32bit""".split()
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
    if facts.given("fsdp_config") and facts.settings.tensor_parallel > 1:
        sentence = "Beside tensor_parallel_size transformers shards the model itself, and FSDP then finds no layers."
        yield facts.warning("fsdp_config", sentence, "leave it out")
    if section.get("state_dict_type") == "LOCAL_STATE_DICT":
        sentence = "FSDP2 has no LOCAL_STATE_DICT: accelerate refuses when training starts."
        path = ("fsdp_config", "state_dict_type")
        yield facts.warning(path, sentence, "write FULL_STATE_DICT or SHARDED_STATE_DICT")


def optimizer(facts: Facts) -> Iterator[Finding]:
    """bitsandbytes' optimizers on the DTensors of FSDP2 and of tensor parallelism: each of them raises in its first step."""
    if facts.get("optimizer") in BITSANDBYTES and facts.settings.strategy in ("fsdp", "tensor"):
        able = "adamw_torch_fused" if facts.settings.fsdp.get("offload_params") else "adamw_torch_8bit"
        sentence = "bitsandbytes steps plain tensors, and sharded weights are DTensors: the first step raises."
        yield facts.error("optimizer", sentence, f"write optimizer: {able}")


def axes(facts: Facts) -> Iterator[Finding]:
    """Heads that do not divide, and axes that do not fill the ranks: the model cannot be split so.

    Tried with Axolotl 0.21 on CPU ranks, where each of these runs ends before its first step.
    """
    settings, shape = facts.settings, facts.prediction.shape
    heads = Widths(shape.heads, shape.kv_heads, 0, 0) if shape else Widths(0, 0, 0, 0)  # the rest may be cut unevenly
    if reason := why_not_tensor_parallel(heads, settings.tensor_parallel):
        sentence, _, fix = reason.rstrip(".").partition(": ")
        yield facts.error("tensor_parallel_size", f"{sentence}.", fix)
    elif settings.cluster and (wrong := _wrong_axis(settings)):
        yield facts.error(*wrong)


def _wrong_axis(settings: Settings) -> tuple[str, str, str] | None:
    """Key, sentence and fix where the sizes of the axes do not fill the ranks."""
    sizes, left = settings.axes, settings.ranks
    for key, size in sizes.items():
        if left % size:
            ranks = f"{left} ranks" if left == settings.ranks else f"The {left} ranks that are left"
            return key, f"{ranks} do not divide by {size}.", f"take a divisor of {left}"
        left //= size
    others = [key for key in sizes if key != "tensor_parallel_size"]
    if settings.tensor_parallel > 1 and others and others != ["dp_shard_size"]:
        sentence = "Axolotl has no mesh for it beside tensor_parallel_size."
        return others[0], sentence, "leave it out: the other ranks shard the model by themselves"
    filled_in = settings.tensor_parallel > 1 or (settings.given("deepspeed") and settings.context_parallel > 1)
    if not others or filled_in:
        return None
    unsharded = "dp_shard_size" not in sizes and (settings.given("fsdp_config") or settings.context_parallel > 1)
    if left > 1:  # Accelerate multiplies the sizes that are written
        sentence = f"All sizes together make {settings.ranks // left} ranks, and there are {settings.ranks}."
        missing = "dp_shard_size" if unsharded else "dp_replicate_size"
        return others[-1], sentence, f"write {missing}: {sizes.get(missing, 1) * left}"
    if unsharded and "dp_replicate_size" in sizes:
        return "dp_replicate_size", "It leaves no ranks to shard over.", "add dp_shard_size, or leave it out"
    return None


def ulysses(facts: Facts) -> Iterator[Finding]:
    """Context parallelism under DeepSpeed: heads and tokens that its ranks cannot share. Under FSDP2 tokens are padded."""
    settings, shape, ranks = facts.settings, facts.prediction.shape, facts.settings.context_parallel
    if ranks == 1 or not facts.given("deepspeed"):
        return
    multiple = (
        settings.number("pad_to_multiple_of") if settings.given("pad_to_multiple_of") else 64
    )  # Axolotl's collator
    tokens = multiple * -(-settings.number("sequence_len") // multiple)
    if shape and (shape.heads % ranks or (shape.kv_heads % ranks and ranks % shape.kv_heads)):
        sentence = f"DeepSpeed does not share {shape.heads} heads and {shape.kv_heads} kv heads among {ranks} ranks."
        yield facts.error(settings.context_key, sentence, "take a divisor of the heads")
    elif not (facts.get("pad_to_sequence_len") or facts.get("sample_packing")):
        sentence = "DeepSpeed gathers the batches of all ranks on a sequence, which must be of one length."
        yield facts.warning(settings.context_key, sentence, "write pad_to_sequence_len: true")
    elif tokens % ranks and not facts.get("sample_packing"):
        sentence = f"Sequences of {tokens} tokens do not divide over {ranks} ranks."
        yield facts.error("sequence_len", sentence, f"take a multiple of {math.lcm(multiple, ranks)}")


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


RULES = (fsdp, optimizer, axes, ulysses, deepspeed)
