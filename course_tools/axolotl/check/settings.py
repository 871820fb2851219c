"""What a YAML amounts to once Axolotl has filled in its defaults: the few facts that every rule asks for."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from course_tools.axolotl.check.gpus import Cluster
from course_tools.axolotl.check.schema import stored
from course_tools.axolotl.check.yaml_lines import Document

# Axolotl's boolean flags of old for attn_implementation, in the order in which they win.
ATTENTION_FLAGS = {
    "xformers_attention": "xformers", "sage_attention": "sage", "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip


MOST = 2**31  # what is above is a slip, and rules_numbers says so


@dataclass(frozen=True)
class Settings:
    """A run: the YAML's values with Axolotl's defaults behind them, the cards, and where its paths count from.

    Attributes:
        values: without unknown keys and wrong types (`keys.cleaned`).
        cluster: the cards; None if none were told.
        folder: the working directory, from which Axolotl reads relative paths.
    """

    document: Document
    values: dict[str, Any]
    cluster: Cluster | None
    folder: Path

    def get(self, key: str) -> Any:
        """A top-level value, or Axolotl's default."""
        if key in self.values:
            return self.values[key]
        return stored()["config"]["properties"].get(key, {}).get("default")

    def number(self, key: str, least: int = 1) -> int:
        """A whole number of at least `least`; what is missing or below is `least`."""
        value = self.get(key)
        return min(MOST, max(least, int(value))) if isinstance(value, int | float) else least

    @property
    def ranks(self) -> int:
        return self.cluster.ranks if self.cluster else 1

    @property
    def tensor_parallel(self) -> int:
        return self.number("tensor_parallel_size")

    @property
    def context_parallel(self) -> int:
        return max(self.number("context_parallel_size"), self.number("sequence_parallel_degree"))

    @property
    def data_ranks(self) -> int:
        """Ranks that each see other sequences: those of tensor and context parallelism share them."""
        return max(1, self.ranks // (self.tensor_parallel * self.context_parallel))

    @property
    def shard_ranks(self) -> int:
        """Ranks that FSDP2 cuts the model over; those of context parallelism are among them."""
        ranks = max(1, self.ranks // self.tensor_parallel)
        if self.values.get("dp_shard_size"):
            return min(ranks, self.number("dp_shard_size") * self.context_parallel)
        return max(1, ranks // self.number("dp_replicate_size"))

    @property
    def adapter(self) -> str:
        return str(self.get("adapter") or "")

    @property
    def attention(self) -> str:
        """As transformers is told; without a choice it takes sdpa."""
        if self.values.get("attn_implementation"):
            return str(self.values["attn_implementation"])
        return next((name for flag, name in ATTENTION_FLAGS.items() if self.values.get(flag)), "")

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32", as `resolve_dtype` decides it on these cards."""
        bf16, fp16 = self.get("bf16"), self.get("fp16")
        if bf16 is True or self.get("bfloat16") is True:
            return "bf16"
        if bf16 == "auto" and not fp16:
            has = self.cluster is None or (not self.cluster.cpu and self.cluster.card.bf16)
            return "bf16" if has else "fp32" if fp16 is False or self.get("float16") else "fp16"
        return "fp16" if fp16 or self.get("float16") or self.get("load_in_8bit") else "fp32"

    @cached_property
    def fsdp(self) -> dict[str, Any]:
        """fsdp_config; empty without FSDP."""
        return self.values.get("fsdp_config") or {}

    @cached_property
    def deepspeed_file(self) -> Path | None:
        """The JSON's path as Axolotl would open it; None without one."""
        named = self.values.get("deepspeed")
        return self.folder / named if isinstance(named, str) else None

    @cached_property
    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed's configuration; empty without one, and where it cannot be read (a finding says so)."""
        given = self.values.get("deepspeed")
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
    def strategy(self) -> str:
        """ "single", "ddp", "zero0" to "zero3", "fsdp"; "tensor" where all ranks hold parts of one copy.

        With tensor parallelism transformers shards over the ranks that are left, as FSDP2 does, whether or not the YAML
        has an fsdp_config.
        """
        if self.values.get("fsdp_config"):
            return "fsdp"
        if self.values.get("deepspeed"):
            stage = self.zero.get("stage", 0)
            return f"zero{stage}" if stage in (0, 1, 2, 3) and not isinstance(stage, bool) else "zero0"
        if self.tensor_parallel > 1:
            return "tensor" if self.data_ranks * self.context_parallel == 1 else "fsdp"
        return "ddp" if self.ranks > 1 else "single"

    @property
    def accumulation(self) -> int:
        """Micro-batches a step. Axolotl's own default of 1 wins over `batch_size`, which therefore changes nothing."""
        return self.number("gradient_accumulation_steps")

    @property
    def local_datasets(self) -> list[dict[str, Any]]:
        found = self.values.get("datasets")
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    def local(self, name: str) -> bool:
        """Whether a path is meant to lie here: it does, or it looks like a path and not like a name on a hub."""
        return os.path.exists(self.folder / name) or name.startswith((".", "/", "~")) or name.count("/") > 1
