"""How the ranks share the model: FSDP1 that is gone, two masters at once, axes that do not divide, DeepSpeed's JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding

REPLACED = {"sharding_strategy": "write reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)"}
REFUSED = ("sharding_strategy", "forward_prefetch")
IGNORED = (
    "sync_module_states",
    "backward_prefetch",
    "backward_prefetch_policy",
    "limit_all_gathers",
    "use_orig_params",
)
EIGHT_BIT = ("adamw_8bit", "adamw_bnb_8bit")
MATCHING = (
    ("train_micro_batch_size_per_gpu", "micro_batch_size"), ("gradient_accumulation_steps", "gradient_accumulation_steps"),
)  # fmt: skip


def rules(facts: Facts) -> Iterator[Finding]:
    """Findings about FSDP, DeepSpeed, tensor and context parallelism."""
    yield from _fsdp1(facts)
    yield from _both(facts)
    yield from _fsdp(facts)
    yield from _axes(facts)
    yield from _deepspeed(facts)


def _fsdp1(facts: Facts) -> Iterator[Finding]:
    raw = facts.settings.document.values
    if raw.get("fsdp"):
        yield facts.error(
            "fsdp", "The list `fsdp:` set up FSDP1, which Axolotl has removed.",
            "put reshard_after_forward, auto_wrap_policy and offload_params into fsdp_config, with fsdp_version: 2",
        )  # fmt: skip
    section = raw.get("fsdp_config") if isinstance(raw.get("fsdp_config"), dict) else {}
    for path, version in (
        (("fsdp_version",), raw.get("fsdp_version")),
        (("fsdp_config", "fsdp_version"), section.get("fsdp_version")),
        (("fsdp_config", "version"), section.get("version")),
    ):
        if version is not None and str(version) != "2":
            yield facts.error(path, f"FSDP{version} is no longer in Axolotl.", "write fsdp_version: 2")
    for key in section:
        plain = str(key).removeprefix("fsdp_")
        path = ("fsdp_config", str(key))
        if plain in REFUSED:
            yield facts.error(path, "An option of FSDP1, which Axolotl refuses.", REPLACED.get(plain, "leave it out"))
        elif plain in IGNORED:
            yield facts.warning(path, "An option of FSDP1: Axolotl drops it.", "leave it out")
        elif str(key).startswith("fsdp_") and key != "fsdp_version":
            yield facts.warning(
                path, "The prefix fsdp_ is FSDP1's way of writing; Axolotl still strips it.", f"write {plain}"
            )


def _both(facts: Facts) -> Iterator[Finding]:
    if facts.given("deepspeed") and facts.given("fsdp_config"):
        yield facts.error(
            "deepspeed", "fsdp_config and deepspeed are both set: each shards the model its own way, and Axolotl refuses.",
            "keep one of the two",
        )  # fmt: skip
    if (
        facts.given("fsdp_version")
        and not facts.given("fsdp_config")
        and not facts.settings.document.values.get("fsdp")
    ):
        yield facts.error(
            "fsdp_version", "Without fsdp_config there is no FSDP: the run is plain DDP.", "add fsdp_config"
        )


def _fsdp(facts: Facts) -> Iterator[Finding]:
    fsdp = facts.settings.fsdp
    if not fsdp:
        return
    if facts.settings.cluster and facts.settings.ranks == 1:
        yield facts.warning("fsdp_config", "One rank has nobody to shard with.", "leave it out, or take more cards")
    if facts.get("optimizer") in EIGHT_BIT:
        yield facts.error(
            "optimizer", f"FSDP2 cannot shard the states of {facts.get('optimizer')}, and Axolotl refuses.",
            "write optimizer: adamw_torch_8bit",
        )  # fmt: skip
    policy = fsdp.get("auto_wrap_policy")
    if policy == "SIZE_BASED_WRAP" and not fsdp.get("min_num_params"):
        yield facts.error(
            ("fsdp_config", "auto_wrap_policy"), "SIZE_BASED_WRAP needs min_num_params, and Axolotl refuses without it.",
            "add min_num_params: 100000000, say",
        )  # fmt: skip
    if fsdp.get("cpu_offload_pin_memory") is False and not fsdp.get("offload_params"):
        yield facts.error(
            ("fsdp_config", "cpu_offload_pin_memory"), "It speaks of offloaded parameters, and offload_params is not on.",
            "leave it out",
        )  # fmt: skip
    if fsdp.get("state_dict_type") == "LOCAL_STATE_DICT":
        yield facts.error(
            ("fsdp_config", "state_dict_type"), "FSDP2 has no LOCAL_STATE_DICT: accelerate refuses when training starts.",
            "write FULL_STATE_DICT or SHARDED_STATE_DICT",
        )  # fmt: skip


def _axes(facts: Facts) -> Iterator[Finding]:
    settings = facts.settings
    tensor, context = settings.tensor_parallel, settings.context_parallel
    key = "tensor_parallel_size" if tensor > 1 else "context_parallel_size"
    if tensor * context == 1:
        if settings.cluster and facts.given("dp_shard_size") and not settings.fsdp:
            yield facts.error(
                "dp_shard_size", "Sharding needs fsdp_config: without it Axolotl refuses.", "add fsdp_config"
            )
        return
    if settings.cluster and settings.ranks % (tensor * context):
        yield facts.error(
            key, f"{tensor} x {context} ranks on a sequence do not divide {settings.ranks} ranks.",
            "take sizes whose product divides the ranks",
        )  # fmt: skip
    shape = facts.prediction.shape
    if shape and (shape.heads % tensor or (shape.kv_heads % tensor and tensor % shape.kv_heads)):
        yield facts.error(
            "tensor_parallel_size", f"{shape.heads} heads and {shape.kv_heads} key-value heads do not divide by {tensor}.",
            f"take a divisor of {shape.kv_heads}",
        )  # fmt: skip
    if tensor > 1 and settings.adapter:
        yield facts.error(
            "tensor_parallel_size", f"Axolotl trains no {settings.adapter} under tensor parallelism (but on NVFP4 weights).",
            "shard with fsdp_config instead",
        )  # fmt: skip
    if tensor > 1 and facts.get("optimizer") in (*EIGHT_BIT, "paged_adamw_8bit"):
        yield facts.error(
            "optimizer", f"{facts.get('optimizer')} does not go with tensor parallelism, and Axolotl refuses.",
            "write optimizer: adamw_torch_fused",
        )  # fmt: skip
    if context > 1 and settings.attention == "eager":
        yield facts.error(
            "attn_implementation", "Context parallelism replaces the attention kernel, and eager attention has none.",
            "write attn_implementation: sdpa or flash_attention_2",
        )  # fmt: skip


def _deepspeed(facts: Facts) -> Iterator[Finding]:
    given, file = facts.given("deepspeed"), facts.settings.deepspeed_file
    if not given:
        return
    if file is not None:
        problem = _unreadable(facts, file)
        if problem:
            yield problem
            return
    config, zero = facts.settings.deepspeed, facts.settings.zero
    for key in ("zero_optimization", "bf16", "fp16"):
        if not isinstance(config.get(key, {}), dict):
            yield facts.error(
                "deepspeed", f'"{key}" in DeepSpeed\'s configuration is an object.', f'write "{key}": {{…}}'
            )
    stage = zero.get("stage", 0)
    name = f"{given}: " if isinstance(given, str) else ""
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield facts.error(
            "deepspeed", f"{name}ZeRO has the stages 0, 1, 2 and 3, and {stage!r} is none.", "give one of them"
        )
    elif stage == 0:
        yield facts.warning("deepspeed", f"{name}stage 0 shards nothing: it is DDP.", "name a stage of 1, 2 or 3")
    for their, ours in MATCHING:
        value = config.get(their, "auto")
        if value != "auto" and value != facts.settings.number(ours):
            yield facts.error(
                "deepspeed",
                f"{name}{their} is {value!r}, and {ours} is {facts.settings.number(ours)}.",
                f'write "{their}": "auto"',
            )
    whole = config.get("train_batch_size", "auto")
    if whole != "auto" and facts.settings.cluster and whole != facts.batch.global_batch:
        yield facts.error(
            "deepspeed", f"{name}train_batch_size is {whole!r}, and the YAML makes it {facts.batch.global_batch}.",
            'write "train_batch_size": "auto"',
        )  # fmt: skip
    yield from _precision(facts, name)
    if facts.settings.section("zero_optimization", "offload_param").get("device") in ("cpu", "nvme") and stage != 3:
        yield facts.error("deepspeed", f"{name}offload_param needs stage 3, and this is stage {stage}.", "leave it out")


def _precision(facts: Facts, name: str) -> Iterator[Finding]:
    on = {kind: facts.settings.section(kind).get("enabled", "auto") for kind in ("bf16", "fp16")}
    if on["bf16"] is True and on["fp16"] is True:
        yield facts.error("deepspeed", f"{name}bf16 and fp16 are both enabled.", 'write "enabled": "auto" in both')
        return
    for kind, value in on.items():
        wanted = facts.settings.precision == kind
        if value != "auto" and value is not wanted:
            yield facts.error(
                "deepspeed", f"{name}{kind} is {'on' if value else 'off'}, and the YAML trains in {facts.settings.precision}.",
                f'write "{kind}": {{"enabled": "auto"}}',
            )  # fmt: skip


def _unreadable(facts: Facts, file: Any) -> Finding | None:
    """A finding if the JSON cannot be read."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        document = facts.settings.document.path
        fix = "give its path from the folder that axolotl is started in"
        if document and os.path.isfile(document.parent / str(facts.given("deepspeed"))):
            fix = f"it lies beside the YAML, and paths count from the working directory: start axolotl in {document.parent}"
        return facts.error("deepspeed", f"{facts.given('deepspeed')} cannot be read: {error.strerror}.", fix)
    except UnicodeDecodeError:
        return facts.error("deepspeed", f"{facts.given('deepspeed')} is no text file.", "give DeepSpeed's JSON")
    except json.JSONDecodeError as error:
        return facts.error(
            "deepspeed",
            f"{facts.given('deepspeed')} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}.",
        )
    if not isinstance(read, dict):
        return facts.error("deepspeed", f"{facts.given('deepspeed')} holds no object.", "write {…}")
    return None
