"""Seconds that one GPU computes for one block and for the output layer, forward and backward, of one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from course_lib.memory import Shape
from course_lib.memory.parameters import local_experts, local_matrices
from course_tools.planning.question import Question
from course_tools.planning.table import Table


class Block(NamedTuple):
    """Seconds of one block, of one micro-batch, a value for each row of the table.

    Attributes:
        products: matrix products, there and back. attention: its forward pass; all of it is `attention_passes` times that.
        elementwise: norms, activations, rotations, the scores of eager attention, adapters: bound by memory.
        recomputed: forward again for the backward pass. dequantized: NF4 to 16 bits, at each use.
        waiting: what launching kernels takes beyond all that.
    """

    products: np.ndarray
    attention: np.ndarray
    attention_passes: float
    elementwise: np.ndarray
    recomputed: np.ndarray
    dequantized: np.ndarray
    waiting: np.ndarray

    @property
    def total(self) -> np.ndarray:
        attention = self.attention * self.attention_passes
        return self.products + attention + self.elementwise + self.recomputed + self.dequantized + self.waiting


def rates(question: Question) -> tuple[float, float]:
    """FLOP/s of large matrix products and bytes/s of element-wise kernels on the card."""
    k, card = question.constants, question.machines.card
    slow = k.fp32 if question.precision == "fp32" and not question.machines.cpu else 1.0
    return card.peak_flops * k.matmul * slow * (k.hopper if hopper(question) else 1.0), card.bandwidth * k.memory


def hopper(question: Question) -> bool:
    """An H100 or later data-center card."""
    capability = question.machines.card.capability
    return capability is not None and (9, 0) <= capability < (12, 0)


def of_a_layer(shape: Shape, t: int) -> tuple[float, float, float]:
    """Of a layer, in the mean: the weights that multiply a token, rows + columns of their matrices, all weights.

    Of a mixture a token meets the active experts; where tokens are many, all experts are read.
    """
    weights = sides = read = 0.0
    share = shape.experts.active / shape.experts.number if shape.experts else 1.0
    for block, number in shape.kinds:
        for rows, columns in local_matrices(block, t).values():
            weights += number * rows * columns
            sides += number * (rows + columns)
            read += number * rows * columns
        elements = local_experts(block, t)
        for which, (experts, rows, columns) in block.experts.items():
            met = 1.0 if which == "router" else share
            weights += number * met * elements[which]
            sides += number * met * experts * (rows + columns) / t
            read += number * elements[which]
    return weights / shape.layers, sides / shape.layers, read / shape.layers


def block_seconds(question: Question, table: Table, tp: np.ndarray, tokens: np.ndarray) -> Block:
    """`tokens`: of a micro-batch on one GPU."""
    shape, k, e = question.shape, question.constants, question.element
    flops, memory = rates(question)
    degrees = sorted({grid.tp for grid in table.grids})
    which = np.array([degrees.index(grid.tp) for grid in table.grids])[table.grid]
    weights, sides, read = np.array([of_a_layer(shape, t) for t in degrees]).T[:, which]

    full = np.array([way.method == "full" for way in table.ways])[table.way]
    quantized = np.array([way.method == "qlora" for way in table.ways])[table.way]
    product = 2 * tokens * weights / flops + e * (tokens * sides + read) / memory
    products = product * np.where(full, 3.0, 2.0)

    eager = question.attention == "eager"
    keys = question.seq_len if eager else question.seq_len / 2
    at_once = question.seq_len / table.axis("cp")
    flash = k.flash * (k.hopper_flash if hopper(question) else 1.0) * question.machines.card.peak_flops
    rate = flops if eager else flash * at_once / (at_once + k.flash_half)
    attention = 2 * tokens * keys * (shape.attention_width + shape.value_width) / tp / rate
    passes = 3.0 if eager else 1 + k.backward_flash

    norms = 0.0 if shape.norm_bias or question.compile else k.loose_norms  # torch has a kernel for LayerNorm
    stream = (k.stream_passes + norms) * shape.hidden / np.where(table.split, tp, 1)
    inner = (
        shape.experts.active * shape.experts.intermediate + shape.experts.shared
        if shape.experts
        else shape.intermediate
    )
    wide = inner * (2 if shape.gated else 1) + shape.attention_width + 2 * shape.kv_width
    light = e * tokens * (stream + k.width_passes * wide / tp) / memory
    if eager:
        light = light + k.score_passes * e * tokens * question.seq_len * (shape.heads / tp) / memory
    adapters = np.where(full, 0.0, k.adapter_passes * e * tokens * sides / memory)
    dequantized = np.where(quantized, k.dequantize_bytes * read / memory, 0.0)

    forward = product + attention + light + adapters + dequantized
    recomputed = np.select([table.kept == 2, table.kept == 1], [forward, light], 0.0)
    elementwise = 3 * (light + adapters)
    spent = products + attention * passes + elementwise + recomputed + 2 * dequantized
    launches = k.kernels * k.launch * (3 + (table.kept == 2)) * np.where(full, 1.0, 2.0)
    return Block(
        products, attention, passes, elementwise, recomputed, 2 * dequantized, np.maximum(launches - spent, 0.0)
    )


def head_seconds(question: Question, table: Table, tp: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The output layer's products and the loss over the vocabulary, both there and back."""
    shape, k, e = question.shape, question.constants, question.element
    flops, memory = rates(question)
    full = np.array([way.method == "full" for way in table.ways])[table.way]
    rows = shape.vocab / tp
    once = (
        2 * tokens * rows * shape.hidden / flops + e * (tokens * (rows + shape.hidden) + rows * shape.hidden) / memory
    )
    return once * np.where(full, 3.0, 2.0), k.logit_bytes * tokens * rows / memory
