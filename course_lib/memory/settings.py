"""The choices that an estimate takes, and what is wrong with a choice that means nothing."""

from __future__ import annotations

from course_lib.memory.cards import Card, card
from course_lib.memory.shapes import Shape
from course_lib.validation import check_counts, pick

CHOICES: dict[str, tuple[str, ...]] = {
    "method": ("full", "lora", "qlora"),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "optimizer": ("adamw", "adamw8bit", "paged_adamw8bit", "sgd"),
    "strategy": ("single", "ddp", "zero1", "zero2", "zero3", "fsdp"),
    "checkpointing": ("none", "selective", "full"),
    "attention": ("flash", "eager"),
    "offload": ("none", "optimizer", "all"),
    "step": ("fused", "foreach", "loop"),
    "device": ("cuda", "cpu"),
}
QUANTIZED = ("nf4", "4bit", "int4", "fp4")


def check_choices(**chosen: str) -> None:
    """Raises ValueError for a value that is no choice; the nearest one is offered."""
    for name, value in chosen.items():
        if name == "precision" and value in QUANTIZED:
            raise ValueError(
                f"precision={value!r}: weights in 4 bits cannot be trained themselves: that is method='qlora'."
            )
        pick(name, value, CHOICES[name])


def check_parallel(
    shape: Shape, t: int, p: int, c: int, seq_len: int, ranks: int, strategy: str, sequence_parallel: bool
) -> None:
    """Raises ValueError where the model does not divide as asked."""
    if type(sequence_parallel) is not bool:
        raise ValueError(f"sequence_parallel={sequence_parallel!r}: give True or False.")
    if shape.positions and seq_len > shape.positions:
        raise ValueError(
            f"{shape.name} has {shape.positions:,} learned positions: seq_len={seq_len:,} is too long for it."
        )
    if shape.heads % t:
        raise ValueError(f"{shape.name} has {shape.heads} heads: tensor_parallel={t} does not divide them.")
    if shape.kv_heads % t and t % shape.kv_heads:
        raise ValueError(
            f"{shape.name} has {shape.kv_heads} kv heads: tensor_parallel={t} neither divides nor repeats them."
        )
    if shape.intermediate % t or shape.vocab % t:
        what = "intermediate width" if shape.intermediate % t else "vocabulary"
        size = shape.intermediate if shape.intermediate % t else shape.vocab
        raise ValueError(f"{shape.name}'s {what} of {size:,} does not divide by tensor_parallel={t}.")
    if p > shape.layers:
        raise ValueError(f"{shape.name} has {shape.layers} layers: too few for pipeline_parallel={p} stages.")
    if seq_len % c:
        raise ValueError(f"seq_len={seq_len} does not divide by context_parallel={c}.")
    if ranks > 1 and strategy == "single":
        raise ValueError(f"ranks={ranks} with strategy='single': several ranks need ddp, zero1, zero2, zero3 or fsdp.")


def check_method(method: str, optimizer: str, strategy: str, offload: str, lora_rank: int) -> None:
    """Raises ValueError for combinations that no program runs."""
    if method != "full":
        check_counts(lora_rank=lora_rank)
    if offload == "optimizer" and strategy in ("single", "ddp"):
        raise ValueError(
            f"offload='optimizer' needs a strategy that can: zero1, zero2, zero3 or fsdp, not {strategy!r}."
        )
    if offload == "all" and strategy not in ("zero3", "fsdp"):
        raise ValueError(f"offload='all' needs sharded parameters: strategy zero3 or fsdp, not {strategy!r}.")
    if offload != "none" and "8bit" in optimizer:
        raise ValueError(f"optimizer={optimizer!r} has no CPU step: with offload take adamw.")


def check_card(precision: str, on: str | Card) -> Card:
    """The card; raises ValueError where it cannot compute in the precision."""
    found = card(on)
    if precision.startswith("bf16") and not found.bf16:
        raise ValueError(f"A {found.name} has no bf16: take precision='fp16-mixed', or 'fp32'.")
    return found
