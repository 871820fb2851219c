"""The tapes of a block and of the head, worked out once and stacked into one matrix: bytes = forms @ sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from course_lib.memory.blocks import SYMBOLS, Numerics, block, head
from course_lib.memory.tape import Size, highest


@dataclass(frozen=True)
class Forms:
    """Rows of `matrix`, by what they are; the values of SYMBOLS, in elements, are the vector that it multiplies.

    The single rows, in this order: saved by a block, by the first block, by the head, of which logits; kept of a block by
    full checkpointing, by selective checkpointing; a block's weight gradients. Then the phases, in slices.
    """

    matrix: np.ndarray
    forward: slice
    first_pass: slice
    backward: slice
    head_forward: slice
    head_backward: slice


NUM_SINGLE = 7


@lru_cache(maxsize=256)
def forms(numerics: Numerics, grad_in: bool, accumulate: bool) -> Forms:
    """`grad_in`: the embedding is trained, or checkpointing has made its output ask for a gradient."""
    body, x = block(numerics)
    first, _ = block(numerics, grad_in=grad_in)
    top, y = head(numerics)
    saved_by_head = top.saved()
    rows: list[Size] = [
        body.saved(),
        first.saved(),
        {symbol: each for symbol, each in saved_by_head.items() if symbol != "NV"},
        {"NV": saved_by_head["NV"]},
        dict(x.size),
        {symbol: x.size.get(symbol, 0) + body.kept().get(symbol, 0) for symbol in {*x.size, *body.kept()}},
        body.weight_grads(),
    ]
    assert len(rows) == NUM_SINGLE
    slices = []
    for sizes in (
        body.forward_sizes(x),
        body.forward_sizes(x, keep=False),
        body.backward_sizes(accumulate=accumulate),
        top.forward_sizes(y),
        top.backward_sizes(accumulate=accumulate),
    ):
        candidates = highest(sizes)
        slices.append(slice(len(rows), len(rows) + len(candidates)))
        rows.extend(candidates)
    matrix = np.zeros((len(rows), len(SYMBOLS)))
    for row, size in zip(matrix, rows, strict=True):
        for symbol, each in size.items():
            row[SYMBOLS.index(symbol)] = each
    return Forms(matrix, *slices)
