"""Bytes that depend on the model and the run's choices, not on batch or length: what one pipeline stage holds."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from course_lib.memory.parameters import Held, count, held
from course_lib.memory.quantized import adam8bit_bytes, nf4_bytes
from course_lib.memory.settings import Run
from course_lib.memory.shapes import Shape

LIVE_ELEMENTS = 10**9  # DeepSpeed's stage3_max_live_parameters and stage3_max_reuse_distance


class Resident(NamedTuple):
    """Bytes on one GPU, but for `trainable`, in elements.

    At rest: weights, gradients, optimizer, and DDP's or ZeRO's communication buckets. Gathered for a moment under sharded
    parameters: a block's copy, and that of embedding, last norm and head (zero3: of all that is gathered at a time). Then
    the gradients of one block, of the outer matrices, of the embedding alone; autocast's 2-byte copies of a block's
    weights, of the head's, and those copies that serve no gradient; the optimizer's temporary. Of the gradients: all of
    them unsharded, a rank's share, that share in fp32, and as many as go through a bucket at a time.
    """

    weights: int
    gradients: int
    optimizer: int
    trainable: int
    buckets: int
    block_copy: int
    outer_copy: int
    embedding_copy: int
    block_gradient: int
    outer_gradient: int
    embedding_gradient: int
    block_casts: int
    outer_casts: int
    unused_casts: int
    step: int
    whole: int
    share: int
    master_share: int
    bucketful: int


@lru_cache(maxsize=8192)
def resident(
    run: Run, shape: Shape, ranks: int, t: int, layers: int, first: bool, last: bool, experts: int = 1
) -> Resident:
    """`t`: tensor-parallel ranks; `ranks`: data-parallel ones; `first`, `last`: the stage has the embedding, the head.

    `experts`: expert-parallel ranks, among the data-parallel ones. So many hold one copy of the experts together, and what
    is sharded over all ranks is sharded alike with and without them.
    """
    h = held(shape, t, layers, first, last, run.rank, experts, run.lora_targets)
    all_of_it = held(shape, t, layers, first, last, run.rank, 1, run.lora_targets)
    compute, share = run.numerics.compute, "weights" in run.shards
    block = (count(h.matrices) + count(h.vectors) + count(h.experts)) // layers
    outer, factors = count(h.outer), count(h.factors)
    copies = count(_embeddings(h)) if run.train_embeddings else 0
    trained, by_adam = _trained(run, h)
    trainable = count(trained)
    embedding = shape.vocab * shape.hidden // t

    blocks_at_rest, constants = run.at_rest * count(h.matrices), 0
    if run.method == "qlora":  # the constants are no parameters: each rank has all of them
        blocks_at_rest = sum(nf4_bytes(elements) * number for elements, number in h.matrices)
        constants = blocks_at_rest - count(h.matrices) // 2 if share else 0
    weights = blocks_at_rest + run.at_rest * (count(h.vectors) + outer) + _factors_at_rest(run) * factors
    weights += _experts_at_rest(run, shape, all_of_it if share else h)
    weights += run.at_rest * copies  # PEFT keeps the frozen ones beside those that it trains
    if share:
        weights = _share(weights - constants, ranks) + constants
    if not shape.positions:  # rotary frequencies: two buffers of half a head's turning features in fp32, on every rank
        weights += 4 * (shape.latent.rope if shape.latent else shape.head_dim)

    shared = count(_trained(run, all_of_it)[0])
    # unsharded, PEFT's copies have the base model's dtype, and so have their gradients and moments
    narrow = copies * (run.gradient - run.stored) if not run.shards else 0
    gradients = 0 if run.optimizer_in_backward else run.gradient * trainable - narrow
    if "gradients" in run.shards:
        gradients = _share(run.gradient * shared, ranks)
    states = _states(run, trained, by_adam) - (2 * narrow if run.optimizer == "adamw" else 0)
    if run.shards:
        states = _share(_states(run, *_trained(run, all_of_it)), ranks)
    if run.offload != "none":  # gradients follow the optimizer to the host
        gradients = states = 0
    if run.offload == "all":
        weights = constants

    buckets = bucketful = 0
    if run.strategy == "ddp":
        buckets = run.gradient * trainable
    elif run.zero_stage:
        buckets, bucketful = compute * run.bucket_elements, compute * min(run.bucket_elements, trainable)
        if run.offload != "none" and run.zero_stage < 3:  # a gradient on its way to the host
            buckets += compute * max((elements for elements, _ in trained), default=0)
    gathered = compute * h.largest + run.factors * (factors // layers)
    if run.method == "qlora":
        gathered += blocks_at_rest // layers - compute * (count(h.matrices) // layers)
    outer_copy = compute * outer
    if run.strategy == "zero3":  # module by module, and one ahead; or all that is used again within so many elements
        at_a_time = 2 * max(elements for elements, _ in (*h.matrices, *h.experts, *h.outer))
        there = count(h.all_base())
        outer_copy = compute * min(at_a_time if run.reshard_after_forward else LIVE_ELEMENTS, there)
        gathered = 0
    casts = 2 if run.numerics.autocast else 0
    unsharded = (run.stored if run.full else run.factors) * trainable
    here = shared if run.offload == "none" else 0  # a share of gradients goes on to the host as soon as it is summed
    return Resident(
        weights,
        gradients,
        states,
        trainable,
        buckets,
        block_copy=gathered if share else 0,
        outer_copy=outer_copy if share else 0,
        embedding_copy=compute * embedding if share else 0,
        block_gradient=run.stored * block if run.full else run.factors * factors // layers,
        outer_gradient=run.stored * (outer if run.full else copies),
        embedding_gradient=run.stored * embedding if (run.full or copies) and first else 0,
        block_casts=casts * (count(h.matrices) if run.full else factors) // layers,  # not of experts, see `blocks`
        outer_casts=casts * embedding if run.full and last else 0,
        # nothing before the first block is trained: the copies of A beside q, k and v serve no gradient of an input
        unused_casts=0 if run.full or not first else casts * 3 * run.rank * shape.hidden,
        step=max(_temporary(run, by_adam, ranks), _newton_schulz(run, shape)),
        whole=unsharded,
        share=_share(run.gradient * here, ranks),
        master_share=_share(run.master * here, ranks),
        bucketful=bucketful,
    )


def _trained(run: Run, h: Held) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What is trained; and which of it AdamW steps: all but what Muon takes, matrices of the blocks or LoRA's factors."""
    copies = _embeddings(h) if run.train_embeddings else []
    trained = [*h.all_base()] if run.full else [*h.factors, *copies]
    if run.optimizer != "muon":
        return trained, trained
    return trained, [*h.vectors, *h.experts, *h.outer] if run.full else copies


def _embeddings(h: Held) -> list[tuple[int, int]]:
    """Embedding and output layer, where the stage has them: all that lies outside the blocks but the last norm."""
    largest = max((elements for elements, _ in h.outer), default=0)
    return [(elements, number) for elements, number in h.outer if elements == largest]


def _experts_at_rest(run: Run, shape: Shape, h: Held) -> int:
    """bitsandbytes quantizes linear layers. A mixture's experts were such in transformers 4, one by one, but for gpt-oss's and
    Llama 4's; in transformers 5 they are parameters of their own, and stay in 16 bits unless somebody sees to it."""
    e = shape.experts
    linear = run.transformers == 4 and e is not None and not e.bias and not e.rows
    if run.method == "qlora" and (linear or run.quantize_experts):
        return nf4_bytes(count(h.experts))
    return run.at_rest * count(h.experts)


def _factors_at_rest(run: Run) -> int:
    return 4 if run.strategy == "fsdp" and run.gradient == 4 else run.factors


def _states(run: Run, trained: list[tuple[int, int]], by_adam: list[tuple[int, int]]) -> int:
    """Of the optimizer: two Adam states and a step counter a tensor, one state where Muon steps; master copies."""
    states = 0
    if run.optimizer in ("adamw", "adamw_bf16", "muon"):
        states = run.state * (count(trained) + count(by_adam)) + 4 * sum(number for _, number in by_adam)
    elif run.optimizer == "adamw8bit" or (run.optimizer == "paged_adamw8bit" and run.device == "cpu"):
        tables = 2 * 4 * 256 if any(adam8bit_bytes(elements) != 8 * elements for elements, _ in trained) else 0
        states = sum(adam8bit_bytes(elements) * number for elements, number in trained) + tables
    return states + run.master * count(trained)


def _temporary(run: Run, by_adam: list[tuple[int, int]], ranks: int) -> int:
    """What Adam's step needs beside its states."""
    if run.offload != "none" or run.optimizer == "sgd":
        return 0
    largest = max((elements for elements, _ in by_adam), default=0)
    if "8bit" in run.optimizer:  # CUDA's kernel works in place; the CPU's unpacks one tensor at a time to fp32
        return 5 * 4 * largest if run.device == "cpu" else 0
    here = _share(count(by_adam), ranks) if run.shards else count(by_adam)
    if run.zero_stage:
        largest = here  # one flat tensor
    elif run.strategy == "fsdp":
        largest = _share(largest, ranks)
    return {"foreach": run.state * here, "loop": 2 * run.state * min(largest, here), "fused": 0}[run.step]


def _newton_schulz(run: Run, shape: Shape) -> int:
    """What Muon's step needs beside its states. It goes through the matrices one by one, whatever `step` says.

    The update in the gradient's dtype; in bf16 two iterates, and their products with themselves, square in the shorter
    side. Of a sharded matrix DTensor gathers what each product needs: at most the whole, which is counted.
    """
    if run.optimizer != "muon":
        return 0
    pairs = [pair for block, _ in shape.kinds for pair in block.matrices.values()]
    if not run.full:
        pairs = [(run.rank, side) for pair in pairs for side in pair]
    return max((run.state + 2 * 2) * rows * columns + 2 * 2 * min(rows, columns) ** 2 for rows, columns in pairs)


def _share(value: int, parts: int) -> int:
    """A rank's part, the fullest rank's."""
    return -(-value // parts)
