"""FLOPs a token, with what is counted and what is not."""

from __future__ import annotations

from typing import Any

from course_lib.memory.presets import shape_of
from course_lib.memory.shapes import Shape
from course_lib.validation import pick, positive

RECOMPUTE = ("none", "full")


def multiplied_weights(shape: Shape) -> tuple[int, int]:
    """(weights of the blocks, weights of the output layer) that each token is multiplied with.

    The output layer counts whether tied or not, of a mixture the active experts; tables (a lookup costs no FLOP), norms and
    biases do not.
    """
    active = {} if shape.experts is None else {"router": 1.0}
    share = shape.experts.active / shape.experts.number if shape.experts else 1.0
    weights = 0.0
    for block, number in shape.kinds:
        weights += number * sum(rows * columns for rows, columns in block.matrices.values())
        for name, (experts, rows, columns) in block.experts.items():
            weights += number * experts * rows * columns * active.get(name, share)
    return round(weights), shape.vocab * shape.hidden


def flops_per_token(
    model: str | Shape | Any,
    seq_len: int,
    *,
    recompute: str = "none",
    causal: bool = False,
    frozen: bool = False,
) -> float:
    """FLOPs of one training step (forward and backward) a token; a multiply-add is two.

    Every weight that multiplies costs 2 forward, 2 for the gradient of its input and 2 for its own: the 6 of "6N".
    Attention's two products cost 4 x layers x keys x (heads x head_dim) forward and twice that backward. With a GPT's
    widths this is 72 L h^2 (1 + s/6h + V/12hL), appendix A of arXiv:2205.05198; with ``recompute="full"``
    96 L h^2 (1 + s/6h + V/16Lh), equation 3 of arXiv:2104.04473. Grouped-query attention and SwiGLU change the matrices,
    not the rule.

    Args:
        model: a preset's name, a Shape, a mapping of widths, a transformers configuration.
        seq_len: tokens a sequence.
        recompute: what hardware does again in backward: "none", or "full", every block, the output layer not.
        causal: count the keys that a token may see, (s + 1) / 2 on average; False: all s, as both papers do.
        frozen: the weights get no gradient of their own, as under LoRA, whose small factors are left out.
    """
    pick("recompute", recompute, RECOMPUTE)
    positive(seq_len=seq_len)
    shape = shape_of(model)
    blocks, output = multiplied_weights(shape)
    keys = (seq_len + 1) / 2 if causal else seq_len
    attention = 2 * shape.layers * keys * (shape.attention_width + shape.value_width)
    total = (4 if frozen else 6) * (blocks + output) + 3 * attention
    if recompute == "full":
        total += 2 * blocks + attention
    return float(total)
