"""How far real programs stay behind data sheets: every number of the cost model that is no width and no data sheet."""

from __future__ import annotations

from dataclasses import dataclass

# How sure a step time is: of the published ones that no constant was chosen on, how many there are, within what share of the
# measured speed half of the predictions lie, and nine of ten. benchmarks/planner.py prints them.
HELD_OUT, HALF_WITHIN, NINE_OF_TEN_WITHIN = 51, 0.12, 0.29


@dataclass(frozen=True)
class Constants:
    """One set for all cards, models and splits; `benchmarks/planner.py` holds it against the published rows.

    A matrix product of (n, c) by (c, r) takes ``2 n r c / (peak x matmul) + bytes / (bandwidth x memory)``. Its share of
    `matmul` is therefore I / (I + I0) with I = 1 / (1/n + 1/r + 1/c) and I0 the card's balance of FLOPs to bytes: small
    matrices, and those that tensor parallelism has made small, are slow without a constant of their own.

    Attributes:
        matmul: share of the peak that a large matrix product reaches. hopper: the same on H100 and later, over that: under
            load their clocks fall. Tuned programs lose less, others more.
        flash, flash_half: share of the peak that flash attention reaches over long sequences, counted over the keys in
            sight, and the length at which it reaches half of that (FlashAttention-2, arXiv:2307.08691, figures 4 to 6:
            99 TFLOP/s at 512 tokens, 187 at 16,384 on an A100). A ring of ranks computes it length / cp at a time.
            hopper_flash: on H100 and later over that; FlashAttention-2 does not know their tensor cores.
        memory: share of the data sheet's memory bandwidth that element-wise kernels reach.
        stream_passes: times that a block's forward pass reads or writes a residual stream (2 norms, 2 additions).
            loose_norms: how often more where RMSNorm is no kernel of its own: transformers casts, squares, averages,
            multiplies and casts back, 36 bytes an element instead of 6, and a block has two of them.
        width_passes: the same for what is as wide as the MLP (activation, gate) or as queries, keys and values (rotation).
        score_passes: the same for the scores of eager attention (write, scale, mask, softmax, dropout, read).
        logit_bytes: bytes moved for a logit, forward and backward: fp32 copy, log-softmax, gradient.
        kernels: kernels of a block's forward pass; backward twice that. launch: seconds that each costs at least.
        backward_flash: flash attention's backward pass over its forward pass (it computes the scores again).
        fp32: peak of fp32 products over that of 16-bit ones (tensor cores without TF32).
        optimizer_bytes: moved by AdamW for a parameter that it steps in fp32: gradient, weight, two moments, and back.
        dequantize_bytes: moved to make 16-bit weights of a parameter in NF4, once for each use.
        adapter_passes: times that a LoRA layer goes over its input or output beside the frozen product.
        inner, outer: share of a link's rate inside a node and between nodes. H200 and A100 nodes: 82 % and 78 % of NVLink
            in ring all-reduces of 16 GiB (the table's rows h200x8_allreduce_ring and a100x8_allreduce).
        overlap: share of data-parallel traffic that can hide behind computing.
        exposed_sends: share of the pipeline's sends that nothing hides.
        pcie: bytes a second between a GPU and its host. host: bytes a second of a node's memory, for offloaded steps.
    """

    matmul: float = 0.80
    flash: float = 0.55
    flash_half: float = 400.0
    memory: float = 0.80
    stream_passes: float = 12.0
    width_passes: float = 3.0
    score_passes: float = 7.0
    loose_norms: float = 30.0
    hopper: float = 0.78
    hopper_flash: float = 0.6
    logit_bytes: float = 20.0
    kernels: float = 20.0
    launch: float = 4e-6
    backward_flash: float = 2.5
    fp32: float = 1 / 12
    optimizer_bytes: float = 30.0
    dequantize_bytes: float = 4.0
    adapter_passes: float = 2.0
    inner: float = 0.78
    outer: float = 0.80
    overlap: float = 0.80
    exposed_sends: float = 0.5
    pcie: float = 20e9
    host: float = 150e9


CONSTANTS = Constants()
