"""`estimate`: bytes on a GPU for a training step, from the model's widths and the choices of the run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from course_lib.memory import settings
from course_lib.memory.blocks import Numerics
from course_lib.memory.breakdown import Breakdown
from course_lib.memory.cards import Card
from course_lib.memory.forms import Forms, forms
from course_lib.memory.parameters import count, held, local_factors, local_matrices
from course_lib.memory.quantized import adam8bit_bytes, nf4_bytes
from course_lib.memory.shapes import Shape, shape_of

BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's defaults of reduce_bucket_size and allgather_bucket_size


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
    step: str = "foreach",
    card: str | Card | None = None,
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
            host when memory is short: counted as not on the GPU), "sgd" (no momentum, no state).
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
        step: AdamW's implementation: "foreach" (PyTorch's default on CUDA: one state-sized temporary), "fused" (none),
            "loop" (the default on the CPU: two of the largest tensor).
        card: a card's name; only checked for what it cannot do.

    Raises:
        ValueError: an unknown model or choice, sizes that do not divide, a rank of 0, bf16 on a card without it.

    Sources: ZeRO, arXiv:1910.02054 (states); Korthikanti et al., arXiv:2205.05198 (activations); QLoRA, arXiv:2305.14314
    (NF4); Zhao et al., arXiv:2304.11277, section 3.2.1 (gathered units).
    """
    run = _run(method, precision, optimizer, strategy, offload, step, checkpointing, attention, lora_rank)
    shape = model if type(model) is Shape else shape_of(model)
    settings.check_counts(
        ranks=ranks, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel,
        context_parallel=context_parallel, micro_batch=micro_batch, seq_len=seq_len, micro_batches=micro_batches,
    )  # fmt: skip
    settings.check_parallel(
        shape, tensor_parallel, pipeline_parallel, context_parallel, seq_len, ranks, strategy
    )
    if card is not None:
        settings.check_card(precision, card)
    sizes = _sizes(
        shape, micro_batch, seq_len, tensor_parallel, context_parallel, sequence_parallel, lora_rank
    )
    if pipeline_parallel == 1:
        return _stage(run, shape, sizes, ranks, tensor_parallel, shape.layers, True, True, micro_batches, micro_batches, seq_len)
    layers, p = -(-shape.layers // pipeline_parallel), pipeline_parallel
    ends = [
        _stage(run, shape, sizes, ranks, tensor_parallel, layers, True, False, min(p, micro_batches), micro_batches, seq_len),
        _stage(run, shape, sizes, ranks, tensor_parallel, layers, False, True, 1, micro_batches, seq_len),
    ]
    return max(ends, key=lambda stage: stage.peak)


class _Run(NamedTuple):
    """The choices, checked, and what follows from them alone."""

    method: str
    optimizer: str
    strategy: str
    offload: str
    step: str
    checkpointing: str
    rank: int
    numerics: Numerics
    stored: int
    factors: int
    master: int  # bytes of an fp32 master copy a trained parameter
    state: int  # bytes an element of one Adam state
    gradient: int  # bytes an element of a gradient at rest


@lru_cache(maxsize=4096)
def _run(method, precision, optimizer, strategy, offload, step, checkpointing, attention, lora_rank) -> _Run:
    for name, value in (("method", method), ("precision", precision), ("optimizer", optimizer), ("strategy", strategy),
                        ("checkpointing", checkpointing), ("attention", attention), ("offload", offload), ("step", step)):  # fmt: skip
        settings.check_choice(name, value)
    settings.check_method(method, precision, optimizer, strategy, offload, lora_rank)
    mixed, sharding = precision.endswith("mixed"), strategy in ("zero1", "zero2", "zero3", "fsdp")
    compute = 4 if precision == "fp32" else 2
    autocast = mixed and not sharding
    stored = 4 if precision == "fp32" or (autocast and method == "full") else 2
    factors = 2 if precision == "bf16" else 4
    if sharding and mixed:
        factors = 2  # the shards are fp32, the copies that compute 16-bit
    numerics = Numerics(method, compute, stored, factors, autocast, attention == "eager")
    master = 4 if sharding and mixed else 0
    if strategy.startswith("zero") and precision == "fp32":
        master = 4 if strategy != "zero3" else 0  # stages 1 and 2 copy their partition whatever its dtype
    state = 4 if mixed or precision == "fp32" else 2
    gradient = 4 if strategy == "fsdp" and mixed else (stored if method == "full" else factors)
    rank = lora_rank if method != "full" else 0
    return _Run(method, optimizer, strategy, offload, step, checkpointing, rank, numerics, stored, factors, master, state, gradient)


class _Sizes(NamedTuple):
    elements: np.ndarray  # the values of blocks.SYMBOLS
    tokens: int
    gathered: int  # elements of one gathered residual stream under sequence parallelism


def _sizes(shape: Shape, micro_batch: int, seq_len: int, t: int, c: int, split: bool, rank: int) -> _Sizes:
    per_token, fixed = _widths(shape, t, split, rank)
    tokens = micro_batch * seq_len // c
    elements = per_token * tokens + fixed
    elements[9] *= seq_len  # NS, the scores: every token looks at the whole sequence
    return _Sizes(elements, tokens, tokens * shape.hidden if split and t > 1 else 0)


@lru_cache(maxsize=1024)
def _widths(shape: Shape, t: int, split: bool, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """SYMBOLS a token, and those that do not depend on tokens."""
    s, kv = t if split else 1, max(shape.kv_heads // t, 1)
    matrices, factors = local_matrices(shape, t), local_factors(shape, rank, t)
    per_token = [1 / s, shape.hidden / s, shape.attention_width / t, kv * shape.head_dim, shape.intermediate / t,
                 shape.heads / t, kv, shape.vocab / t, rank, shape.heads / t]  # fmt: skip
    weights = [matrices[w][0] * matrices[w][1] if w in matrices else 0 for w in "qkvogud"]
    outer = [shape.vocab * shape.hidden / t]
    lora = [sum(factors[w]) if w in factors else 0 for w in "qkvogud"]
    fixed = [0.0] * len(per_token) + weights + outer + lora + [shape.hidden, shape.head_dim, 1]
    return np.array(per_token + [0.0] * (len(fixed) - len(per_token))), np.array(fixed)


class _Resident(NamedTuple):
    """Bytes and elements that do not depend on batch or length, of one stage on one GPU."""

    weights: int
    gradients: int
    optimizer: int
    trainable: int
    bucket: int
    block_copy: int
    outer_copy: int
    block_gradient: int
    outer_gradient: int
    embedding_gradient: int
    block_casts: int
    outer_casts: int
    step: int


@lru_cache(maxsize=8192)
def _resident(run: _Run, shape: Shape, ranks: int, t: int, layers: int, first: bool, last: bool) -> _Resident:
    h = held(shape, t, layers, first, last, run.rank)
    full = run.method == "full"
    matrices, rest = count(h.matrices), count(h.vectors) + count(h.outer)
    factors, base = count(h.factors), matrices + rest
    trained = [*h.all_base()] if full else [*h.factors]
    trainable = base if full else factors
    share = run.strategy in ("zero3", "fsdp")
    at_rest = 4 if run.strategy == "fsdp" and run.master else run.stored  # FSDP's shards are the master copy
    quantized = sum(nf4_bytes(n) * number for n, number in h.matrices) if run.method == "qlora" else at_rest * matrices
    frozen_rest = (at_rest if full else run.stored) * rest
    if not full and run.method == "lora":
        quantized = run.stored * matrices
    adapters = factors * (4 if run.strategy == "fsdp" and run.master else run.factors)
    weights = quantized + frozen_rest + adapters
    if share:
        weights = _ceil(weights, ranks)
    elif not run.strategy.startswith("zero"):
        weights += 4 * shape.head_dim  # rotary frequencies, twice head_dim / 2 in fp32
    weights = 0 if run.offload == "all" else weights

    gradients = run.gradient * trainable
    if run.strategy in ("zero2", "zero3", "fsdp"):
        gradients = _ceil(gradients, ranks)
    if run.offload != "none":
        gradients = 0  # they follow the optimizer to the host

    if run.optimizer == "adamw":
        state = 2 * run.state * trainable + 4 * sum(number for _, number in trained)
    elif run.optimizer == "adamw8bit":
        state = sum(adam8bit_bytes(n) * number for n, number in trained) + 2 * 4 * 256
    else:
        state = 0
    state += 0 if run.strategy == "fsdp" else run.master * trainable
    if run.strategy not in ("single", "ddp"):
        state = _ceil(state, ranks)
    state = 0 if run.offload != "none" else state

    compute = run.numerics.compute
    block = (matrices + count(h.vectors)) // layers
    block_bytes = (quantized // layers if run.method == "qlora" else compute * matrices // layers) + compute * count(h.vectors) // layers
    block_bytes += run.factors * factors // layers
    bucket = 0
    if run.strategy == "ddp":
        bucket = run.gradient * trainable
    elif run.strategy in ("zero1", "zero2", "zero3"):
        bucket = 2 * compute * min(BUCKET_ELEMENTS, trainable)
    casts = 2 if run.numerics.autocast else 0
    largest = max((n for n, _ in trained), default=0)
    width = 4 if run.master else run.state
    divide = 1 if run.strategy in ("single", "ddp") else ranks
    temporary = {"foreach": width * trainable // divide, "loop": 2 * width * largest // divide, "fused": 0}[run.step]
    if run.optimizer != "adamw" or run.offload != "none":
        temporary = 0
    outer = count(h.outer)
    return _Resident(
        weights, gradients, state, trainable, bucket,
        block_copy=block_bytes if share else 0,
        outer_copy=compute * outer if share else 0,
        block_gradient=(run.stored * block if full else run.factors * factors // layers),
        outer_gradient=run.stored * outer if full else 0,
        embedding_gradient=run.stored * shape.vocab * shape.hidden // t if full and first else 0,
        block_casts=casts * (matrices if full else factors) // layers,
        outer_casts=casts * shape.vocab * shape.hidden // t if full and last else 0,
        step=temporary,
    )  # fmt: skip


def _ceil(value: int, parts: int) -> int:
    return -(-value // parts)


@lru_cache(maxsize=1024)
def _numerics(numerics: Numerics, shape: Shape, t: int) -> Numerics:
    return Numerics(
        **{**numerics.__dict__, "qk_norm": shape.qk_norm, "gated": shape.gated, "layer_norm": shape.norm_bias}
    )


def _stage(
    run: _Run, shape: Shape, sizes: _Sizes, ranks: int, t: int, layers: int, first: bool, last: bool,
    in_flight: int, micro_batches: int, seq_len: int,
) -> Breakdown:  # fmt: skip
    """One pipeline stage. `in_flight`: micro-batches whose activations it holds at a time (1 without a pipeline)."""
    r = _resident(run, shape, ranks, t, layers, first, last)
    pipelined = not (first and last)
    if not pipelined:
        in_flight = 1
    accumulate = micro_batches > 1
    full = run.method == "full"
    f: Forms = forms(_numerics(run.numerics, shape, t), full or run.checkpointing != "none", accumulate)
    values = (f.matrix @ sizes.elements).tolist()
    saved, saved_first, saved_head, log_shares, kept_full, kept_selective, _ = values[:7]
    numerics, tokens = run.numerics, sizes.tokens

    # kept by autograd at the moment of the loss
    kept_block = {"none": saved, "selective": kept_selective, "full": kept_full}[run.checkpointing]
    kept_first = saved_first if run.checkpointing == "none" else kept_block
    ids = 8 * tokens  # int64
    small = 2 * seq_len * shape.head_dim * numerics.stored if not shape.positions else 0  # cosines and sines
    small += (ids if full and first else 0) + (ids + 4 if last else 0)
    activations = kept_first + (layers - 1) * kept_block + small + (saved_head if last else 0)
    casts = layers * r.block_casts + r.outer_casts
    casts_kept = casts if run.checkpointing == "none" else r.outer_casts
    earlier = (in_flight - 1) * (kept_first + (layers - 1) * kept_block)

    # sharded parameters: the block at work and the next one, prefetched; the outer unit stays gathered
    gathered = r.outer_copy + 2 * r.block_copy
    unsharded = 0  # gradients on their way into the shards
    if run.strategy in ("zero2", "zero3", "fsdp") or run.offload != "none":
        unsharded = r.block_gradient
    sequence_gather = sizes.gathered * numerics.compute

    gradients = r.gradients
    base = r.weights + r.optimizer + r.bucket + earlier + gathered + sequence_gather
    if accumulate or run.strategy in ("zero1", "zero2", "zero3", "fsdp"):
        base += gradients
        growing_block = growing_outer = 0  # counted already
    else:
        growing_block, growing_outer = r.block_gradient, r.outer_gradient - r.embedding_gradient * (shape.tied is False)

    highest_forward = max(values[f.forward])
    highest_backward = max(values[f.backward])
    if run.checkpointing != "none":
        highest_forward, highest_backward = max(values[f.first_pass]), max(highest_forward, highest_backward)
    below = kept_first + (layers - 2) * kept_block if layers > 1 else 0
    moments = {"forward of the last block": base + below + small + highest_forward + casts}
    if last:
        head = base + activations - saved_head
        moments["the loss"] = head + max(values[f.head_forward]) + casts
        moments["backward of the loss"] = head + max(values[f.head_backward]) + casts_kept
    last_casts = casts_kept - r.outer_casts if run.checkpointing == "none" else r.block_casts
    moments["backward of the last block"] = (
        base + below + small + highest_backward + last_casts + unsharded + (growing_outer if last else 0)
    )
    moments["backward of the first block"] = (
        base + small + highest_backward + r.block_casts + unsharded + growing_outer + (layers - 1) * growing_block
    )
    at_end = base if accumulate or not (growing_block or growing_outer) else base + gradients
    if full and first:
        twice = r.embedding_gradient if accumulate or (shape.tied and last) else 0
        stream = tokens * shape.hidden * numerics.stored
        moments["gradient of the embedding"] = at_end + twice + stream + (r.outer_gradient if unsharded else 0)
    moments["optimizer step"] = at_end - gathered - sequence_gather - earlier + r.step
    moment = max(moments, key=moments.__getitem__)
    logits = 3 * 4 * tokens * shape.vocab // t if last else 0
    return Breakdown(
        weights=r.weights,
        gradients=gradients,
        optimizer=r.optimizer,
        activations=int(activations + earlier),
        logits=logits,
        buffers=int(r.bucket + gathered + unsharded + sequence_gather + casts),
        kept=int(activations + casts_kept + (log_shares if last else 0)),
        peak=int(moments[moment]),
        moment=moment,
        moments={name: int(value) for name, value in moments.items()},
        num_parameters=shape.parameters + (count(held(shape, 1, shape.layers, True, True, run.rank).factors) if run.rank else 0),
        num_trainable=r.trainable,
    )
