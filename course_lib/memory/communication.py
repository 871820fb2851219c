"""What gradients and communication add to each phase of a step, by the way in which ranks share the model.

Read off DeepSpeed 0.19.8's and PyTorch 2.13's code, and held against the peak of real steps on two ranks (fp32, bf16 and,
under FSDP2, bf16-mixed; micro-batches alone and accumulated): within 5 %, with an offloaded optimizer in bf16 within 8 %.
What gloo copies for itself on CPU ranks is in neither. Where a CPU adds a bf16 gradient to fp32 sums it makes an fp32 copy
first; a GPU does not, and it is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.memory.resident import Resident
from course_lib.memory.settings import Run

SUB_GROUP = 10**9  # DeepSpeed's own sub_group_size, in elements: at stage 3 the optimizer steps so many at a time


class Communication(NamedTuple):
    """Bytes on top of weights and optimizer states, activations left out.

    Attributes:
        forward: until the loss is there. backward: from then on.
        head: of the head's gradients, once they are there. block: of each block that the backward pass has done with.
        end: of all gradients when the backward pass is over, before anything is sent that waited for this.
        last_block, reduced: where gradients are sent of the last block, at the end; 0 where that is no phase of its own.
        on_the_way: of the block before, while a block computes its gradients; 0 where none are.
        first_gather: as the first block arrives, with the root: each in a flat tensor and in its own; else 0.
        gathering: as the last block arrives, in a flat tensor and in its own, with the flat tensor of the one before; else 0.
        step: at the optimizer's step.
        whole: unsharded gradients of one block, on their way into shards; told, and counted where they are.
        at_work: gathered weights of the block at work, contained in `forward` and `backward`; there are none at the loss.
        at_loss: gathered for the output layer alone, where that is a unit of its own.
        left: part of the activations that is still there when gradients are sent for the first time (`reduced`).
    """

    forward: int
    backward: int
    head: int
    block: int
    end: int
    last_block: int
    reduced: int
    step: int
    whole: int = 0
    at_work: int = 0
    at_loss: int = 0
    left: float = 0.0
    on_the_way: int = 0
    gathering: int = 0
    first_gather: int = 0


def communication(run: Run, r: Resident, layers: int, earlier: int, accumulate: bool, tied_here: bool) -> Communication:
    """`earlier`: micro-batches whose gradients are there already; `accumulate`: a new gradient is gone as soon as it is there;
    `tied_here`: embedding and head are one matrix."""
    waiting = r.embedding_gradient if tied_here else 0
    head = 0 if accumulate else r.outer_gradient - (0 if waiting else r.embedding_gradient)
    if run.strategy == "fsdp":
        return _fsdp(run, r, layers, earlier, accumulate, waiting, head)
    if run.strategy == "zero3":
        always = r.buckets + r.share + r.outer_copy
        reduced = always - r.outer_copy + r.bucketful  # gradients in the order of their owners, in a copy of the bucket
        copies = r.master_share + (r.share if run.gradient != run.master else 0)  # made flat, and cast, by sub-group
        copies = min(copies, copies * SUB_GROUP * run.gradient // r.share) if r.share else 0
        step = r.buckets + r.share + copies + r.step
        return Communication(always, always, waiting, 0, always, 0, reduced, step, left=_left(r))
    if run.zero_stage:
        return _zero12(run, r, layers, accumulate, waiting, head)
    there = r.buckets + (r.gradients if accumulate else 0)
    block = 0 if accumulate else r.block_gradient
    end = r.buckets + r.gradients
    return Communication(there, there, waiting if accumulate else head, block, end, 0, 0, end + r.step)


def _zero12(run: Run, r: Resident, layers: int, accumulate: bool, waiting: int, head: int) -> Communication:
    """The bucket is there during the backward pass only. Stage 1 fills it when that is over, so gradients are whole until
    then; stage 2 with each gradient, and the rank's share comes up when the first bucket is full. Offloading sends the sums
    on to the host."""
    overflows = run.bucket_elements < r.trainable
    flat = 2 * r.share + (r.master_share if run.gradient != run.master else 0)  # gathered from tensors, made flat, cast
    step = max(flat, r.master_share + r.step)
    if run.strategy == "zero1":
        before = r.whole if accumulate else 0
        block = 0 if accumulate else r.block_gradient
        end = r.buckets + r.whole
        # slices of the sums come up while whole gradients are there, but for those that lie in the bucket alone
        reduced = end + max(0, r.share - r.bucketful)
        return Communication(before, before + r.buckets, waiting if accumulate else head, block, end, 0, reduced, step)
    if run.offload != "none":
        return Communication(0, r.buckets, waiting, 0, r.buckets + r.bucketful, 0, 0, r.step)
    before = r.share if accumulate else 0
    late = 0 if accumulate or not overflows else r.share
    end = before + r.buckets + late
    # the share comes up after the first bucket was reduced
    reduced = r.buckets + max(before + r.bucketful, (2 if accumulate else 1) * r.share)
    reduced = max(reduced, end + min(r.bucketful, max(r.whole - r.bucketful, 0)))
    return Communication(before, before + r.buckets, waiting, late // layers, end, 0, reduced, step, left=_left(r))


def _left(r: Resident) -> float:
    """The first bucket is full when so much of the backward pass is still to come; 0 where one bucket takes all."""
    return max(0.0, 1 - r.bucketful / r.whole) if r.whole else 0.0


def _fsdp(run: Run, r: Resident, layers: int, earlier: int, accumulate: bool, waiting: int, head: int) -> Communication:
    """Gathered: the root, from the first use to the end; the block at work; and, in one flat tensor each, the block before it
    or after it. Without resharding all blocks, by the end of the forward pass. Gradients of a unit are whole until it is done;
    then they are copied into the input of the reduce-scatter, in fp32 under mixed precision. That input is there until the
    next unit is done.

    Over several micro-batches the sums are whole until the last. Autograd adds to them in place, but under mixed precision they
    are fp32: a unit's new gradients come beside them, and are added when the unit is done. Where each micro-batch is reduced,
    the sums are shards: they are there all along, and a unit's new shard goes as soon as it is added to them.

    Where embedding and output layer are units of their own, each is gathered for its own use and its gradient sent at once.
    """
    outer_copy, outer = r.outer_copy, r.outer_gradient
    head_copy = r.outer_copy - r.embedding_copy if r.outer_copy > r.embedding_copy else r.embedding_copy
    if run.wrap_embeddings and not waiting:
        outer_copy, outer, head = 0, r.embedding_gradient, 0
    blocks = 1 if run.reshard_after_forward else layers - 1
    gathered = outer_copy + (blocks + 1) * r.block_copy
    forward = gathered + (0 if run.reshard_after_forward else r.block_copy)
    wide = widening(run)
    in_shards = earlier > 0 and run.reduce_each_micro_batch
    in_whole = earlier > 0 and not in_shards
    sums = wide * r.whole if in_whole else r.share if in_shards else 0
    block = r.block_gradient
    block_share = r.share * block // r.whole if r.whole else 0
    kept = 0 if in_shards else block_share
    shares = r.share if in_shards else layers * block_share
    outer_share = r.share - layers * block_share
    passed = kept - (wide * block if in_whole else 0) - (0 if run.reshard_after_forward else r.block_copy)
    # a block's own weights have gone when its gradients are sent, and its new gradients are in the sums
    last_block = gathered - r.block_copy + sums + (0 if accumulate else head) + (0 if in_whole else block)
    last_block += wide * block + kept
    # while the embedding's gradient is computed, in the last micro-batch or in one between, which sends nothing
    new_outer = 0 if accumulate else outer
    outer_sums = wide * outer if in_whole else 0
    sent_or_whole = wide * block + shares + outer_sums
    if in_whole and earlier > 1:
        sent_or_whole = max(sent_or_whole, sums)
    sent, head_sent = (outer_sums or outer), (wide if in_whole else 1) * (outer - r.embedding_gradient)
    return Communication(
        forward + sums,
        gathered + sums,
        waiting if accumulate else head,
        passed,
        (outer_copy or r.embedding_copy) + sent_or_whole + new_outer,
        last_block,
        # the root's weights have gone; then all its gradients but one, while its own shard comes
        wide * outer + shares + max(sent, outer_share + (0 if waiting else head_sent)),
        r.share + r.step,
        whole=block,
        at_work=r.block_copy if run.reshard_after_forward else 0,
        on_the_way=wide * block,
        at_loss=0 if outer_copy else head_copy,
        gathering=forward + r.block_copy + sums,
        first_gather=2 * (outer_copy + r.block_copy) + sums,
    )


def widening(run: Run) -> int:
    """How many times as many bytes FSDP2's sums of gradients take as the gradients: 2 under mixed precision, else 1."""
    return run.gradient // (run.stored if run.full else run.factors)
