"""LoRA and QLoRA: adapters that adapt nothing, and settings of an adapter that is not there."""

from __future__ import annotations

from collections.abc import Iterator

from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding

TARGETS = ("lora_target_linear", "lora_target_modules", "lora_target_parameters")


def settings_without_adapter(facts: Facts) -> Iterator[Finding]:
    """LoRA's settings without `adapter:`."""
    unused = [key for key in ("lora_r", "lora_alpha", *TARGETS) if facts.given(key)]
    if unused and not facts.settings.adapter:
        sentence = "Without `adapter:` there is no LoRA: all weights are trained, and this changes nothing."
        yield facts.warning(unused[0], sentence, "add adapter: lora")


def adapter_without_settings(facts: Facts) -> Iterator[Finding]:
    """An adapter without targets, rank or scale. One that is loaded brings its own."""
    if facts.settings.adapter not in ("lora", "qlora") or facts.given("lora_model_dir"):
        return
    if not any(facts.given(key) for key in TARGETS):
        sentence = "No weights are named for the adapter: there is nothing to train."
        yield facts.warning("adapter", sentence, "add lora_target_linear: true")
    for key, usual in (("lora_r", 16), ("lora_alpha", 32)):
        if facts.given(key) is None:
            sentence = f"{key} is missing, and Axolotl has no default for it."
            yield facts.warning("adapter", sentence, f"add {key}: {usual}")


def four_bits_under_another_name(facts: Facts) -> Iterator[Finding]:
    """adapter: lora with 4-bit weights."""
    if facts.settings.adapter == "lora" and facts.given("load_in_4bit"):
        sentence = "adapter: lora with weights in 4 bits is QLoRA under another name; merging treats the two apart."
        yield facts.warning("load_in_4bit", sentence, "write adapter: qlora")


def tensor_parallel(facts: Facts) -> Iterator[Finding]:
    """An adapter under tensor parallelism."""
    if facts.settings.tensor_parallel > 1 and facts.settings.adapter:
        sentence = f"Axolotl trains no {facts.settings.adapter} under tensor parallelism (but on NVFP4 weights)."
        yield facts.warning("tensor_parallel_size", sentence, "shard with fsdp_config instead")


RULES = (settings_without_adapter, adapter_without_settings, four_bits_under_another_name, tensor_parallel)
