"""`estimate`: bytes on a GPU for a training step, from the model's widths and the choices of the run."""

from __future__ import annotations

from typing import Any

from course_lib.memory import settings
from course_lib.memory.breakdown import Breakdown
from course_lib.memory.cards import Card
from course_lib.memory.moments import sizes, stage
from course_lib.memory.moments import step as one_step
from course_lib.memory.presets import shape_of
from course_lib.memory.run_choices import run_of
from course_lib.memory.shapes import Shape
from course_lib.memory.sharded import BUCKET_ELEMENTS
from course_lib.validation import check_counts


def estimate(
    model: str | Shape | dict[str, Any] | Any,
    *,
    method: str = "full",
    precision: str = "bf16-mixed",
    optimizer: str = "adamw",
    strategy: str = "single",
    ranks: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    sequence_parallel: bool = False,
    micro_batch: int = 1,
    seq_len: int = 2048,
    micro_batches: int = 1,
    checkpointing: str = "none",
    attention: str = "flash",
    offload: str = "none",
    lora_rank: int = 16,
    step: str = "fused",
    device: str = "cuda",
    card: str | Card | None = None,
    reshard: bool = True,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Breakdown:
    """Bytes on the fullest GPU during a training step in its steady state (from the second step on).

    Which tensors exist, and for how long, is read off the code that runs: transformers' modelling code in eager mode
    under PyTorch's autograd, PEFT and bitsandbytes for the adapters, DeepSpeed and FSDP2 for the sharding. Compiled or
    hand-fused kernels (a fused cross-entropy, Liger) need less.

    Args:
        model: a preset ("llama-3.1-8b"), a transformers configuration or model, or widths (a Shape or a mapping).
        method: "full"; "lora" (frozen weights in the 16-bit type, factors in fp32); "qlora" (blocks' matrices in NF4
            with double quantization, the rest as in lora).
        precision: "bf16-mixed", "fp16-mixed": fp32 weights under autocast, for "zero*" and "fsdp" 16-bit weights with
            fp32 master copies; "bf16": everything in bf16; "fp32".
        optimizer: "adamw" (two states in the weights' dtype), "adamw8bit", "paged_adamw8bit" (its states may move to the
            host when memory is short: counted as not on the GPU; on a CPU it is adamw8bit), "sgd" (no momentum).
        strategy: how data-parallel ranks share the states; `ranks` is the number of data-parallel ranks.
        tensor_parallel, pipeline_parallel, context_parallel: ranks along these axes; the GPUs in all are their product
            with `ranks`. The fullest pipeline stage is reported, under the 1F1B schedule.
        sequence_parallel: norms and residuals are split along the sequence, too (arXiv:2205.05198).
        micro_batch: sequences in one forward pass. seq_len: tokens a sequence.
        micro_batches: forward passes in one optimizer step (gradient accumulation, or pipeline micro-batches).
        checkpointing: "full" keeps each block's input; "selective" also the outputs of matrix products and attention.
        attention: "flash" never writes the scores out; "eager" does.
        offload: "optimizer": states (and gradients) on the host; "all": parameters as well.
        lora_rank: of each of the seven matrices of a block.
        step: AdamW's implementation: "fused" (no temporary, the choice of transformers' Trainer and of this course),
            "foreach" (torch.optim.AdamW's own on CUDA: one state-sized temporary), "loop" (its own on the CPU: two of
            the largest tensor).
        device: "cuda" or "cpu": bitsandbytes' CPU step unpacks 8-bit states, five fp32 tensors of the largest size.
        card: a card's name; only checked for what it cannot do.
        reshard: "fsdp": a block's gathered weights go after its forward pass; False: they stay until its backward pass.
            "zero3": every tensor goes after its use (stage3_max_reuse_distance 0, as in this course's programs); False:
            DeepSpeed's default, by which up to 10^9 elements stay gathered: of a smaller model all.
        bucket_elements: "zero1" to "zero3": reduce_bucket_size. DeepSpeed allocates such a bucket however small the model:
            its 500 million elements are 1 GB in 16 bits and 2 GB in fp32.

    Raises:
        ValueError: an unknown model or choice, sizes that do not divide, a rank of 0, bf16 on a card without it.

    Held against real steps: one device (tests/test_memory_measured.py), and two ranks under ddp, zero1, zero2, zero3 and
    fsdp (benchmarks/sharding.py): the peak within 5 %. With several micro-batches fsdp's gradients are whole on every
    rank until the last one, as under ``set_requires_gradient_sync(False)``. Frozen or offloaded weights under these
    strategies were not measured at their peak.

    Sources: ZeRO, arXiv:1910.02054 (states); Korthikanti et al., arXiv:2205.05198 (activations); QLoRA, arXiv:2305.14314
    (NF4); Zhao et al., arXiv:2304.11277, section 3.2.1 (gathered units).
    """
    try:
        run = run_of(
            method,
            precision,
            optimizer,
            strategy,
            offload,
            step,
            device,
            checkpointing,
            attention,
            lora_rank,
            reshard,
            bucket_elements,
        )
    except TypeError:  # a list, say, which no cache can look up
        raise ValueError("Choices are names and lora_rank a number, each a single value, not a list.") from None
    shape = model if type(model) is Shape else shape_of(model)
    t, p = tensor_parallel, pipeline_parallel
    if not (type(ranks) is type(t) is type(p) is type(context_parallel) is type(micro_batch) is type(seq_len)
            is type(micro_batches) is int) or min(ranks, t, p, context_parallel, micro_batch, seq_len, micro_batches) < 1:  # fmt: skip
        check_counts(
            ranks=ranks, tensor_parallel=t, pipeline_parallel=p, context_parallel=context_parallel,
            micro_batch=micro_batch, seq_len=seq_len, micro_batches=micro_batches,
        )  # fmt: skip
    settings.check_parallel(shape, t, p, context_parallel, seq_len, ranks, strategy, sequence_parallel)
    if card is not None:
        settings.check_card(precision, card)
    size = sizes(shape, micro_batch, seq_len, t, context_parallel, sequence_parallel, run.rank)
    if p == 1:
        whole = stage(run, shape, ranks, t, shape.layers, True, True, micro_batches > 1)
        return one_step(whole, size, 1)
    layers = -(-shape.layers // p)
    ends = (
        one_step(stage(run, shape, ranks, t, layers, True, False, micro_batches > 1), size, min(p, micro_batches)),
        one_step(stage(run, shape, ranks, t, layers, False, True, micro_batches > 1), size, 1),
    )
    return max(ends, key=lambda end: end.peak)
