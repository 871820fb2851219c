"""LoRA and QLoRA: adapters that adapt nothing, quantized weights that nobody may train, kernels that do not fit."""

from __future__ import annotations

from collections.abc import Iterator

from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding, nearest

ADAPTERS = ("lora", "qlora", "llama-adapter")
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
TARGETS = ("lora_target_linear", "lora_target_modules", "lora_target_parameters")
SETTINGS = ("lora_r", "lora_alpha", "lora_dropout", *TARGETS)


def rules(facts: Facts) -> Iterator[Finding]:
    """Findings about adapters."""
    adapter = facts.settings.adapter
    bits = next((key for key in ("load_in_4bit", "load_in_8bit") if facts.given(key)), "")
    if not adapter:
        if bits:
            yield facts.error(
                bits, "Weights in so few bits cannot be trained themselves: Axolotl refuses without an adapter.",
                f"add adapter: {'qlora' if bits == 'load_in_4bit' else 'lora'}, or leave {bits} out",
            )  # fmt: skip
        elif unused := [key for key in SETTINGS if facts.given(key)]:
            yield facts.error(
                unused[0], "Without `adapter:` there is no LoRA: all weights are trained, and this changes nothing.",
                "add adapter: lora",
            )  # fmt: skip
        return
    if adapter not in ADAPTERS:
        if not facts.given("plugins"):
            near = nearest(adapter, ADAPTERS, 0.5)
            yield facts.error(
                "adapter", f"There is no adapter {adapter!r}.", f"write {near}" if near else "write lora or qlora"
            )
        return
    if adapter == "qlora" and not facts.given("load_in_4bit"):
        yield facts.error(
            "adapter", "qlora means weights in 4 bits, and load_in_4bit is not on.", "add load_in_4bit: true"
        )
    if adapter == "qlora" and facts.given("load_in_8bit"):
        yield facts.error("load_in_8bit", "qlora means weights in 4 bits, not in 8.", "leave it out")
    if adapter in ("lora", "qlora"):
        yield from _targets(facts)
        yield from _kernels(facts)
    if adapter == "lora" and facts.given("load_in_4bit"):
        yield facts.warning(
            "load_in_4bit", "adapter: lora with weights in 4 bits is QLoRA under another name; merging treats the two apart.",
            "write adapter: qlora",
        )  # fmt: skip
    yield from _sharded(facts)


def _targets(facts: Facts) -> Iterator[Finding]:
    if facts.given("lora_model_dir"):  # an adapter that is loaded brings its own
        return
    if not any(facts.given(key) for key in TARGETS):
        yield facts.error(
            "adapter",
            "No weights are named for the adapter: there is nothing to train.",
            "add lora_target_linear: true",
        )
    for key, usual in (("lora_r", 16), ("lora_alpha", 32)):
        if facts.given(key) is None:
            yield facts.error("adapter", f"{key} is missing, and Axolotl has no default for it.", f"add {key}: {usual}")


def _kernels(facts: Facts) -> Iterator[Finding]:
    on = next((key for key in KERNELS if facts.given(key)), "")
    if on and facts.settings.adapter == "lora" and facts.given("load_in_8bit"):
        yield facts.error(
            on, "Axolotl's LoRA kernels do not work on weights in 8 bits, and it refuses.", f"write {on}: false"
        )
    if on and facts.given("trust_remote_code"):
        yield facts.error(
            on,
            "Axolotl's LoRA kernels rewrite code that they know, and trust_remote_code brings other code.",
            f"write {on}: false",
        )


def _sharded(facts: Facts) -> Iterator[Finding]:
    fsdp = facts.settings.fsdp
    if fsdp.get("cpu_ram_efficient_loading") and facts.given("load_in_4bit"):
        if facts.given("qlora_sharded_model_loading") is False or facts.settings.adapter != "qlora":
            yield facts.error(
                ("fsdp_config", "cpu_ram_efficient_loading"),
                "With weights in 4 bits it needs Axolotl's sharded loading, or the ranks wait for each other for ever.",
                "write qlora_sharded_model_loading: true",
            )
    if facts.settings.strategy == "fsdp" and facts.given("rl") in ("dpo", "kto", "orpo", "ipo"):
        if facts.given("load_in_4bit") or facts.given("load_in_8bit"):
            yield facts.error(
                "fsdp_config",
                f"FSDP2 with quantized weights does not go with rl: {facts.given('rl')}.",
                "use DeepSpeed",
            )
