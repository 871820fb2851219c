"""What a YAML amounts to once Axolotl has filled in its defaults: the few facts that every rule asks for."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from course_lib.memory.cards import Cards
from course_tools.axolotl.check.document import Document

# The keys that rules ask for, by what they hold. A value of another kind is left out: Axolotl's validator names it.
KEYS = {
    "whole number": """micro_batch_size gradient_accumulation_steps sequence_len batch_size eval_batch_size max_steps
        warmup_steps tensor_parallel_size context_parallel_size sequence_parallel_degree dp_shard_size dp_replicate_size
        expert_parallel_size         lora_r sample_packing_bin_size pad_to_multiple_of""",
    "number": "num_epochs val_set_size save_steps saves_per_epoch eval_steps evals_per_epoch lora_alpha",
    "flag": """load_in_4bit load_in_8bit bfloat16 float16 sample_packing pad_to_sequence_len multipack_real_batches
        dataloader_drop_last auto_resume_from_checkpoints save_only_model lora_target_linear skip_prepare_dataset
        lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel xformers_attention sage_attention
        flex_attention flash_attention sdp_attention eager_attention qlora_sharded_model_loading
        offload_params cpu_ram_efficient_loading activation_checkpointing quantize_moe_experts
        load_best_model_at_end eval_sample_packing experimental_skip_move_to_device""",
    "text": """base_model tokenizer_config adapter optimizer attn_implementation save_strategy output_dir
        resume_from_checkpoint lora_model_dir rl path split field field_messages message_field_role
        message_field_content state_dict_type final_state_dict_type
        transformer_layer_cls_to_wrap""",
    "flag or text": """bf16 fp16 tf32 gradient_checkpointing activation_offloading tiled_mlp chunked_cross_entropy
        cut_cross_entropy liger_fused_linear_cross_entropy""",
    "text or mapping": "deepspeed type",
    "mapping": "fsdp_config message_property_mappings special_tokens accelerator_config",
    "list": "datasets test_datasets plugins tokens",
    "anything": """pretraining_dataset selective_checkpointing learning_rate lr_scheduler_kwargs fsdp_version
        lora_target_modules lora_target_parameters lora_modules_to_save peft_trainable_token_indices weight length shards""",
}
KINDS = {key: kind for kind, keys in KEYS.items() for key in keys.split()}
DEFAULTS = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "sequence_len": 512,
    "num_epochs": 1.0,
    "bf16": "auto",
    "sample_packing_bin_size": 200,
    "optimizer": "adamw_torch_fused",
    "output_dir": "./model-out",
}
TRUE, FALSE = ("true", "yes", "on", "t", "y", "1"), ("false", "no", "off", "f", "n", "0")
# Axolotl's boolean flags of old for attn_implementation, in the order in which they win.
ATTENTION_FLAGS = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
AMPERE = (8, 0)
MOST = 2**31  # a count above this is a slip, and rules_batch says so


def readable(values: dict[Any, Any]) -> dict[str, Any]:
    """Those of the values that the rules know, each as the kind that Axolotl makes of it: "2048" as 2048."""
    found = {key: _as(KINDS[key], value) for key, value in values.items() if key in KINDS}
    return {key: value for key, value in found.items() if value is not None}


def _as(kind: str, value: Any) -> Any:
    if kind in ("number", "whole number"):
        try:
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            return None
        if kind == "number":
            return (value if isinstance(value, int) else number) if math.isfinite(number) else None
        return int(number) if number.is_integer() else None
    word = str(value).lower() if isinstance(value, str | int) else ""
    if "flag" in kind and word in (*TRUE, *FALSE):
        return word in TRUE
    if "text" in kind and isinstance(value, str):
        return None if "\0" in value else value
    if "mapping" in kind and isinstance(value, dict):
        return value
    if kind == "list":
        return value if isinstance(value, list) else None
    return value if kind == "anything" else None


@dataclass(frozen=True)
class Settings:
    """A run: the YAML's values with Axolotl's defaults behind them, the cards, and where its paths count from.

    Attributes:
        cluster: the cards; None if none were told.
        folder: the working directory, from which Axolotl reads relative paths.
    """

    document: Document
    cluster: Cards | None
    folder: Path

    @cached_property
    def values(self) -> dict[str, Any]:
        return readable(self.document.values)

    def given(self, key: str) -> Any:
        """A top-level value that stands in the YAML; None if it does not."""
        assert key in KINDS, key
        return self.values.get(key)

    def get(self, key: str) -> Any:
        """A top-level value, or Axolotl's default."""
        given = self.given(key)
        return DEFAULTS.get(key) if given is None else given

    def number(self, key: str, least: int = 1) -> int:
        """A whole number of at least `least`; what is missing or below is `least`."""
        return min(MOST, max(least, int(self.get(key) or 0)))

    @property
    def ranks(self) -> int:
        return self.cluster.ranks if self.cluster else 1

    @property
    def tensor_parallel(self) -> int:
        return self.number("tensor_parallel_size")

    @property
    def expert_parallel(self) -> int:
        return self.number("expert_parallel_size")

    @property
    def on_cpu(self) -> bool:
        return self.cluster is not None and self.cluster.card is None

    @property
    def old_card(self) -> str:
        """The card's name and capability if it is older than Ampere; "" otherwise."""
        card = self.cluster.card if self.cluster else None
        if card is None or card.capability is None or card.capability >= AMPERE:
            return ""
        return "a {} has compute capability {}.{}".format(card.name, *card.capability)

    @property
    def context_key(self) -> str:
        """The name that the YAML has for context parallelism, the new one or the old one."""
        return "context_parallel_size" if self.given("context_parallel_size") else "sequence_parallel_degree"

    @property
    def context_parallel(self) -> int:
        return self.number(self.context_key)

    @property
    def axes(self) -> dict[str, int]:
        """The sizes above 1, in the order in which the ranks are divided by them."""
        keys = ("expert_parallel_size", "tensor_parallel_size", self.context_key, "dp_shard_size", "dp_replicate_size")
        return {key: self.number(key) for key in keys if self.number(key) > 1}

    @property
    def data_ranks(self) -> int:
        """Ranks that each see other sequences: those of tensor and context parallelism share them."""
        return max(1, self.ranks // (self.tensor_parallel * self.context_parallel))

    @property
    def shard_ranks(self) -> int:
        """Ranks that FSDP2 cuts the model over; those of context parallelism are among them."""
        shards = self.axes.get("dp_shard_size")
        return shards * self.context_parallel if shards else max(1, self.ranks // self.tensor_parallel)

    @property
    def plugins(self) -> list[str]:
        return [str(name) for name in self.given("plugins") or []]

    @property
    def adapter(self) -> str:
        return self.get("adapter") or ""

    @property
    def attention(self) -> str:
        """As transformers is told; "" without a choice, and then transformers takes sdpa."""
        if self.given("attn_implementation"):
            return self.given("attn_implementation")
        return next((name for flag, name in ATTENTION_FLAGS.items() if self.given(flag)), "")

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32", as `resolve_dtype` decides it on these cards."""
        bf16, fp16 = self.get("bf16"), self.get("fp16")
        if bf16 is True or self.get("bfloat16") is True:
            return "bf16"
        if bf16 == "auto" and not fp16:
            has = self.cluster is None or (self.cluster.card is not None and self.cluster.card.bf16)
            return "bf16" if has else "fp32" if fp16 is False or self.get("float16") else "fp16"
        return "fp16" if fp16 or self.get("float16") or self.get("load_in_8bit") else "fp32"

    @cached_property
    def fsdp(self) -> dict[str, Any]:
        """fsdp_config, its keys without FSDP1's prefix; empty without FSDP."""
        given = self.given("fsdp_config") or {}
        return readable({str(key).removeprefix("fsdp_"): value for key, value in given.items()})

    @cached_property
    def deepspeed_file(self) -> Path | None:
        """The JSON's path as Axolotl would open it; None without one."""
        named = self.given("deepspeed")
        return self.folder / named if isinstance(named, str) else None

    @cached_property
    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed's configuration; empty without one, and where it cannot be read (a finding says so)."""
        given = self.given("deepspeed")
        if isinstance(given, dict):
            return given
        if self.deepspeed_file is None:
            return {}
        try:
            read = json.loads(self.deepspeed_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) else {}

    @property
    def zero(self) -> dict[str, Any]:
        return self.section("zero_optimization")

    def section(self, *names: str) -> dict[str, Any]:
        """A section of DeepSpeed's configuration; empty where it is missing or no object."""
        found: Any = self.deepspeed
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def syncs_each_batch(self) -> bool:
        """Whether FSDP reduces the gradients of each micro-batch; else they stay whole until the last one."""
        found = (self.given("accelerator_config") or {}).get("gradient_accumulation_kwargs")
        return isinstance(found, dict) and bool(found.get("sync_each_batch"))

    @property
    def strategy(self) -> str:
        """ "single", "ddp", "zero0" to "zero3", "fsdp"; "tensor" where all ranks hold parts of one copy.

        With tensor parallelism transformers shards over the ranks that are left, as FSDP2 does, whether or not the YAML
        has an fsdp_config.
        """
        if self.given("fsdp_config"):
            return "fsdp"
        if self.given("deepspeed"):
            stage = self.zero.get("stage", 0)
            return f"zero{stage}" if stage in (0, 1, 2, 3) and not isinstance(stage, bool) else "zero0"
        if self.tensor_parallel > 1:
            return "tensor" if self.data_ranks * self.context_parallel == 1 else "fsdp"
        return "ddp" if self.ranks > 1 else "single"

    def datasets(self, key: str = "datasets") -> list[tuple[int, dict[str, Any]]]:
        """The data sets under a key that can be read, each with its place in the list."""
        found = enumerate(self.given(key) or [])
        return [(index, readable(one)) for index, one in found if isinstance(one, dict)]

    def local(self, name: str) -> bool:
        """Whether a path is meant to lie here: it does, or it looks like a path and not like a name on a hub."""
        return os.path.exists(self.folder / name) or name.startswith((".", "/", "~")) or name.count("/") > 1
