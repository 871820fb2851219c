"""The choices of a training run, and which of them go together.

Whatever offers, checks or explains a choice reads these tables: the memory model, the planner, the training programs, the
checks and the command lines. `why_not` says in one sentence why a combination does not go. No PyTorch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from course_lib.validation import check_counts, did_you_mean, pick

AXES = ("pp", "dp", "cp", "tp")  # slowest first: ranks that are neighbours, and share a machine, differ in the last one
AXIS_NAMES = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}


@dataclass(frozen=True)
class Strategy:
    """How data-parallel ranks share a model.

    Attributes:
        label: its name in tables and sentences.
        shards: which of "optimizer", "gradients" and "weights" are split over the ranks.
        offloads: the values of `offload` that it can run.
        zero_stage: DeepSpeed's stage; 0 for what is not DeepSpeed's.
    """

    label: str
    shards: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ("none",)
    zero_stage: int = 0


METHODS = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}
STRATEGIES = {
    "single": Strategy("one process"),
    "ddp": Strategy("DDP"),
    "zero1": Strategy("ZeRO-1", ("optimizer",), ("none", "optimizer"), 1),
    "zero2": Strategy("ZeRO-2", ("optimizer", "gradients"), ("none", "optimizer"), 2),
    "zero3": Strategy("ZeRO-3", ("optimizer", "gradients", "weights"), ("none", "optimizer", "all"), 3),
    "fsdp": Strategy("FSDP", ("optimizer", "gradients", "weights"), ("none", "all")),
}
PRECISIONS = ("bf16-mixed", "fp16-mixed", "bf16", "fp32")
OPTIMIZERS = ("adamw", "adamw_bf16", "adamw8bit", "paged_adamw8bit", "muon", "sgd")
OFFLOADS = ("none", "optimizer", "all")  # least first
ACTIVATION_CHECKPOINTING = ("none", "selective", "full")  # least first
ATTENTION = ("flash", "eager")
LOSSES = ("eager", "half", "compiled", "chunked", "fused")
SELECTIVE_KEEPS = ("products", "half_of_products", "all_but_scores")  # of a block, under selective checkpointing
LORA_TARGETS = ("all", "attention")
STEPS = ("fused", "foreach", "loop")  # implementations of the optimizer's step
LOADING = ("sharded", "whole", "card")  # who reads the checkpoint: one process of a machine, or each of them all of it
DEVICES = ("cuda", "cpu")
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")

# Arguments that stand for one of several names
CHOICES: dict[str, tuple[str, ...]] = {
    "method": tuple(METHODS),
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "strategy": tuple(STRATEGIES),
    "activation_checkpointing": ACTIVATION_CHECKPOINTING,
    "attention": ATTENTION,
    "loss": LOSSES,
    "offload": OFFLOADS,
    "loading": LOADING,
    "selective_keeps": SELECTIVE_KEEPS,
    "lora_targets": LORA_TARGETS,
    "step": STEPS,
    "device": DEVICES,
    "schedule": SCHEDULES,
}
QUANTIZED = ("nf4", "4bit", "int4", "fp4")


def check_choice(name: str, value: str) -> None:
    """Check that `value` is one of CHOICES[name]. Raises ValueError, which offers the nearest one."""
    if name == "precision" and value in QUANTIZED:
        raise ValueError(
            f"precision={value!r}: weights in 4 bits cannot be trained themselves: that is method='qlora'."
        )
    pick(name, value, CHOICES[name])


def why_not(
    *,
    method: str = "full",
    optimizer: str = "adamw",
    strategy: str = "single",
    offload: str = "none",
    ranks: int = 1,
    tp: int = 1,
    pp: int = 1,
) -> str:
    """Why no program runs these choices together, in one sentence; "" where one does.

    Args:
        method, optimizer, strategy, offload: keys of the tables above.
        ranks: data-parallel ranks, those that `strategy` shares the model among.
        tp, pp: ranks along the tensor and the pipeline axis.
    """
    how = STRATEGIES[strategy]
    if offload not in how.offloads:
        able = [name for name, other in STRATEGIES.items() if offload in other.offloads]
        if strategy == "fsdp":
            return (
                f"offload={offload!r}: FSDP2 offloads parameters, gradients and optimizer together or not at all; "
                "give offload='all' or 'none'."
            )
        what = "weights on the host" if offload == "all" else "the optimizer on the host"
        return f"offload={offload!r} puts {what}, which {_either(able)} can do and {strategy} cannot."
    if strategy == "fsdp" and (optimizer == "paged_adamw8bit" or (optimizer == "adamw8bit" and offload != "none")):
        return "bitsandbytes steps plain tensors, and FSDP2 has DTensors: take adamw8bit by torchao, without offload."
    if tp > 1 and optimizer == "paged_adamw8bit" and not how.zero_stage:
        return "bitsandbytes steps plain tensors, and tensor parallelism has DTensors: take adamw8bit by torchao."
    if offload != "none" and optimizer not in ("adamw", "sgd", "adamw8bit"):
        return f"This course steps optimizer={optimizer!r} on the GPU alone: with offload take adamw."
    if optimizer == "muon" and how.zero_stage:
        return "This course's Muon is torch's, and takes no flat shares of ZeRO: with muon take fsdp, ddp or single."
    if ranks > 1 and strategy == "single":
        others = [name for name in STRATEGIES if name != "single"]
        return f"ranks={ranks} with strategy='single': several ranks need {_either(others)}."
    if pp > 1 and how.zero_stage > 1:
        return f"DeepSpeed's pipeline takes no {strategy}: with pp={pp} take zero1, ddp or fsdp."
    if pp > 1 and how.zero_stage and offload != "none":
        # DeepSpeed 0.19.8 trains so on CPU ranks; its issue 3866 (bf16 on GPUs) is open
        return f"This course's ZeRO pipelines have no offload={offload!r}: with pp={pp} take 'none', ddp or fsdp."
    if method == "qlora" and tp > 1:
        return (
            f"bitsandbytes keeps each quantized matrix in one piece, and tp={tp} would split it: with qlora take tp=1."
        )
    return ""


def check_combination(**choices: str | int) -> None:
    """Raises ValueError with the sentence of `why_not`, whose arguments these are."""
    if reason := why_not(**choices):  # type: ignore[arg-type]
        raise ValueError(reason)


class HasWidths(Protocol):
    """What tensor parallelism cuts; a `course_lib.memory.Shape` has it, of a transformers config see `Widths`."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def vocab(self) -> int: ...


class Widths(NamedTuple):
    """Attention heads, kv heads, columns of the MLP, tokens of the vocabulary."""

    heads: int
    kv_heads: int
    intermediate: int
    vocab: int


def why_not_tensor_parallel(widths: HasWidths, tp: int) -> str:
    """Why a model does not split over `tp` tensor-parallel ranks, in one sentence; "" where it does.

    Megatron-LM also gives several ranks a copy of one kv head; no program here does, nor does transformers' plan.
    """
    check_counts(tp=tp)
    for number, what in (
        (widths.heads, "attention heads"),
        (widths.kv_heads, "kv heads"),
        (widths.intermediate, "columns of the MLP"),
        (widths.vocab, "tokens of the vocabulary"),
    ):
        if number % tp:
            padded = f", or pad the vocabulary to {-(-number // tp) * tp:,}" if what.endswith("vocabulary") else ""
            able = ", ".join(map(str, tensor_parallel_degrees(widths)))
            return f"{number:,} {what} do not divide over {tp} tensor-parallel ranks: take one of {able} ranks{padded}."
    return ""


def check_tensor_parallel(widths: HasWidths, tp: int) -> None:
    """Raises ValueError with the sentence of `why_not_tensor_parallel`."""
    if reason := why_not_tensor_parallel(widths, tp):
        raise ValueError(reason)


def tensor_parallel_degrees(widths: HasWidths) -> list[int]:
    """All numbers of tensor-parallel ranks over which a model splits."""
    common = math.gcd(widths.heads, widths.kv_heads, widths.intermediate, widths.vocab)
    return [tp for tp in range(1, common + 1) if common % tp == 0]


def why_not_expert_parallel(experts: int, ep: int, strategy: str, ranks: int) -> str:
    """Why a mixture's experts do not go to `ep` ranks, in one sentence; "" where they do.

    Args:
        experts: of a block; 0 where the model is no mixture.
        ep: expert-parallel ranks. strategy, ranks: of the data-parallel ranks, which these are among.
    """
    if ep == 1:
        return ""
    if not experts:
        return f"it is no mixture of experts, so expert_parallel={ep} has nothing to share out: take 1."
    if experts % ep or ranks % ep:
        number, what = (experts, "experts") if experts % ep else (ranks, "data-parallel ranks")
        return f"{number} {what} do not divide by expert_parallel={ep}."
    if STRATEGIES[strategy].zero_stage:
        return f"DeepSpeed shares out experts in its own way, not counted here: with expert_parallel={ep} take ddp or fsdp."
    return ""


def check_schedule(schedule: str, stages: int, num_microbatches: int, virtual_stages: int = 1) -> None:
    """Check that a pipeline schedule goes with these numbers. Raises ValueError, one sentence.

    Args:
        schedule: one of SCHEDULES.
        stages: ranks in the pipeline.
        num_microbatches: in one optimizer step.
        virtual_stages: stages that each rank holds; at least 2 for "interleaved", 1 for the others.
    """
    if schedule not in SCHEDULES:
        near = did_you_mean(schedule, SCHEDULES, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"schedule={schedule!r}: {hint}Choose one of {', '.join(SCHEDULES)}.")
    check_counts(stages=stages, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    if schedule == "interleaved":
        if virtual_stages == 1:
            raise ValueError("virtual_stages=1: 'interleaved' with one stage per rank is '1f1b'; give at least 2.")
        if num_microbatches % stages:
            raise ValueError(
                f"num_microbatches={num_microbatches} is not a multiple of the {stages} ranks: 'interleaved' sends "
                f"micro-batches through in groups of {stages}; take {-(-num_microbatches // stages) * stages}."
            )
    elif virtual_stages > 1:
        raise ValueError(
            f"virtual_stages={virtual_stages}: {schedule!r} has one stage per rank; take schedule='interleaved' for more."
        )


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
