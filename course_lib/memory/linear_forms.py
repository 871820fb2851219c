"""The tapes of a block and of the head, worked out once and stacked into one matrix: bytes = forms @ sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from course_lib.memory.blocks import SYMBOLS, Numerics, block, head
from course_lib.memory.tape import Moment, Size, highest, plus


@dataclass(frozen=True)
class Forms:
    """Rows of `matrix`, by what they are; the values of SYMBOLS, in elements, are the vector that it multiplies.

    The single rows, in this order: saved by a block, by the first block, by the head, of which logits; kept of a block by
    full checkpointing, by selective checkpointing; a block's weight gradients. Then the phases, in slices; of those rows
    `saved` and `weight_grads` hold what is kept for backward and what is a weight's gradient. `logits`: the most bytes that
    one logit takes.
    """

    matrix: np.ndarray
    saved: np.ndarray
    weight_grads: np.ndarray
    forward: slice
    first_pass: slice
    backward: slice
    head_forward: slice
    head_backward: slice
    evaluation: slice
    logits: float


NUM_SINGLE = 7


@lru_cache(maxsize=256)
def forms(numerics: Numerics, grad_in: bool, accumulate: bool) -> Forms:
    """`grad_in`: the embedding is trained, or checkpointing has made its output ask for a gradient."""
    body, x = block(numerics)
    first, _ = block(numerics, grad_in=grad_in)
    top, y = head(numerics)
    # fused losses are for training: without gradients Liger's writes the logits out
    evaluated, z = head(replace(numerics, loss="eager") if numerics.loss == "fused" else numerics)
    saved_by_head = top.saved()
    rows: list[Size] = [
        body.saved(),
        first.saved(),
        {symbol: each for symbol, each in saved_by_head.items() if symbol != "NV"},
        {"NV": saved_by_head.get("NV", 0)},
        dict(x.size),
        plus(x.size, body.kept(numerics.selective_keeps)),
        body.weight_grads(),
    ]
    assert len(rows) == NUM_SINGLE
    slices: list[slice] = []
    parts = [Moment({}, {}, {})] * NUM_SINGLE
    for moments in (
        body.forward_moments(x),
        body.forward_moments(x, keep=False),
        body.backward_moments(accumulate=accumulate),
        top.forward_moments(y),
        top.backward_moments(accumulate=accumulate),
        evaluated.forward_moments(z, keep=False),
    ):
        candidates = highest(moments)
        slices.append(slice(len(rows), len(rows) + len(candidates)))
        rows.extend(moment.total for moment in candidates)
        parts.extend(candidates)
    matrices = (_matrix(sizes) for sizes in (rows, [m.saved for m in parts], [m.weight_grads for m in parts]))
    of_training = parts[: slices[-1].start]
    return Forms(*matrices, *slices, logits=max(moment.total.get("NV", 0) for moment in of_training))


def _matrix(rows: list[Size]) -> np.ndarray:
    matrix = np.zeros((len(rows), len(SYMBOLS)))
    for row, size in zip(matrix, rows, strict=True):
        for symbol, each in size.items():
            row[SYMBOLS.index(symbol)] = each
    return matrix
