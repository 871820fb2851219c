"""What one training step sends along each axis of the rank grid: how many collectives, of how many bytes.

Each function answers for one rank, the busiest one where ranks differ. A micro-batch's forward and backward pass send
some messages every time; others travel once in an optimizer step, however many micro-batches it has: `Message.every`
says which. The letters of the formulas: b sequences in a micro-batch, s tokens a sequence, h hidden, e bytes a number,
L layers, k = kv_heads x head_dim.

>>> tensor_parallel(shape_of("llama-3.1-8b"), tp=8, micro_batch_size=1, seq_len=8192)
>>> sum(m.total_bytes for m in data_parallel(8_030_261_248, dp=8, strategy="zero3"))

Sources: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), tensor parallelism; Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), sequence parallelism; Narayanan et al. 2021
(arXiv:2104.04473), pipelines; Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054); Zhao et al. 2023, "PyTorch FSDP"
(arXiv:2304.11277); Liu et al. 2023, "Ring Attention" (arXiv:2310.01889).
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.choices import STRATEGIES, check_tensor_parallel
from course_lib.memory.shapes import Shape
from course_lib.validation import pick

LOSS_BYTES = 4  # maxima, sums and targets' logits of the loss are fp32 whatever the model is in


class Message(NamedTuple):
    """Collectives, or sends, that are alike."""

    collective: str  # of `course_lib.collectives.links.ROUNDS`, or "send" to one other rank
    count: int  # how many of them follow each other
    num_bytes: float  # payload of one, as `ring_seconds` takes it: the whole array, gathered or before it is scattered
    axis: str  # of the rank grid: "tp", "pp", "dp" or "cp"
    every: str = "micro_batch"  # or "step" for what is sent once in an optimizer step

    @property
    def total_bytes(self) -> float:
        """Payload of all of them."""
        return self.count * self.num_bytes


def tensor_parallel(
    shape: Shape,
    *,
    tp: int,
    micro_batch_size: int,
    seq_len: int,
    element: int = 2,
    sequence_parallel: bool = False,
) -> list[Message]:
    """Splitting each matrix over `tp` ranks: Megatron-LM's layers. All messages of b s h e bytes but the loss's.

    - A layer: 2 all-reduces forward (after attention's and the MLP's second matrix: g) and 2 backward (f): 4 L.
    - Vocabulary in parallel: 1 all-reduce after the embedding, 1 of the gradient before the output layer; and in the
      loss 3 of b s numbers in fp32: the largest logit, the sum of exponentials, the target's logit.
    - Sequence parallelism makes of each all-reduce a reduce-scatter on one side and an all-gather on the other, the same
      bytes on a ring, and adds one all-reduce a step: the gradients of the 2 L + 1 norms, which saw a part of the
      sequence each (fp32, in one piece). Not counted: Megatron gathers the input of the first matrices again in the
      backward pass instead of keeping it, 2 more all-gathers a layer and 1 at the output layer.

    Grouped kv heads change none of this.

    Args:
        micro_batch_size: sequences in one forward pass of these ranks together, b.
        seq_len: tokens a sequence, s; with context parallelism those of one context-parallel rank.
        element: bytes of an activation: 2 in bf16 and fp16, 4 in fp32.
    """
    check_tensor_parallel(shape, tp)
    if tp == 1:
        return []
    states = micro_batch_size * seq_len * shape.hidden * element
    pairs = 2 * shape.layers + 1  # the embedding's g and the output layer's f make one more pair
    loss = Message("all_reduce", 3, micro_batch_size * seq_len * LOSS_BYTES, "tp")
    if sequence_parallel:
        _part(seq_len, tp)  # each rank's norms see one
        norms = Message("all_reduce", 1, (2 * shape.layers + 1) * shape.hidden * 4, "tp", "step")
        return [Message(kind, 2 * pairs, states, "tp") for kind in ("all_gather", "reduce_scatter")] + [norms, loss]
    return [Message("all_reduce", 2 * pairs, states, "tp"), loss]


def pipeline(
    shape: Shape,
    *,
    pp: int,
    virtual_stages: int = 1,
    micro_batch_size: int,
    seq_len: int,
    tp: int = 1,
    cp: int = 1,
    element: int = 2,
    sequence_parallel: bool = False,
) -> list[Message]:
    """Splitting the layers over `pp` ranks, in `virtual_stages` stages each: hidden states forward, their gradients backward.

    A message is b s h e / cp bytes, and / tp more under sequence parallelism, where each tensor-parallel rank hands on
    its part of the sequence. pp v stages have pp v - 1 borders, each crossed once forward and once backward; a rank in
    the middle sends 2 v messages for a micro-batch, and of two ranks each sends 2 v - 1. Receiving goes on at the same
    time. Not counted: the all-reduce between first and last stage of a tied embedding's gradients, once a step.
    """
    if pp * virtual_stages > shape.layers:
        raise ValueError(f"{shape.layers} layers do not fill pp={pp} x virtual_stages={virtual_stages} stages.")
    tokens = _part(seq_len, cp * (tp if sequence_parallel else 1))
    if pp == 1:
        return []
    count = 2 * virtual_stages if pp > 2 else 2 * virtual_stages - 1
    return [Message("send", count, micro_batch_size * tokens * shape.hidden * element, "pp")]


def data_parallel(
    num_parameters: float,
    *,
    dp: int,
    strategy: str = "ddp",
    element: int = 2,
    grad_element: int = 4,
    activation_checkpointing: bool = False,
) -> list[Message]:
    """Copies of the model, or shards of one, over `dp` ranks; N parameters on each rank of the other axes.

    - "ddp": an all-reduce of N gradients a step (buckets do not change the bytes).
    - "zero1": a reduce-scatter of N gradients and an all-gather of N parameters a step: the same bytes on a ring.
    - "zero2": the same, but gradients are scattered with every micro-batch, for no rank keeps them whole.
    - "zero3", "fsdp": with every micro-batch parameters are gathered for the forward pass and again for the backward
      pass, and gradients scattered. With `activation_checkpointing` ZeRO-3 gathers a third time, for the pass that is
      computed again (ZeRO-Infinity, arXiv:2104.07857, section 4.1); FSDP2 computes it inside the backward pass's gathering.

    `element` and `grad_element` are bytes of a parameter and of a gradient as they travel.
    """
    pick("strategy", strategy, [name for name in STRATEGIES if name != "single"])
    if dp == 1:
        return []
    parameters, gradients = num_parameters * element, num_parameters * grad_element
    if strategy == "ddp":
        return [Message("all_reduce", 1, gradients, "dp", "step")]
    scattered = Message("reduce_scatter", 1, gradients, "dp", "step" if strategy == "zero1" else "micro_batch")
    if strategy in ("zero1", "zero2"):
        return [scattered, Message("all_gather", 1, parameters, "dp", "step")]
    gathers = 3 if activation_checkpointing and strategy == "zero3" else 2
    return [Message("all_gather", gathers, parameters, "dp"), scattered]


def context_parallel(
    shape: Shape, *, cp: int, micro_batch_size: int, seq_len: int, tp: int = 1, element: int = 2
) -> list[Message]:
    """Splitting the sequence over `cp` ranks, attention too: keys and values go round a ring (arXiv:2310.01889).

    A message is a rank's keys and values of one layer, 2 b (s / cp) (k / tp) e bytes, s tokens of the whole sequence.
    Forward they are handed on cp - 1 times a layer, backward again, and their gradients cp times, once more to come home:
    (3 cp - 2) L sends. (Llama 3, arXiv:2407.21783, gathers keys and values in one all-gather a layer instead: the same
    bytes forward.) The gradients of the parameters are summed with data parallelism's: count dp x cp ranks there.
    """
    tokens = _part(seq_len, cp)
    check_tensor_parallel(shape, tp)
    if cp == 1:
        return []
    size = 2 * micro_batch_size * tokens * shape.kv_heads // tp * shape.head_dim * element
    return [Message("send", (3 * cp - 2) * shape.layers, size, "cp")]


def _part(seq_len: int, parts: int) -> int:
    """Tokens of one rank's part of a sequence."""
    if seq_len % parts:
        raise ValueError(f"seq_len={seq_len} does not divide into {parts} parts: take a multiple of {parts} tokens.")
    return seq_len // parts
