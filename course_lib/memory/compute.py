"""Counts of parameters, and FLOPs a token: each with what is counted and what is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from course_lib.memory.presets import shape_of
from course_lib.memory.shapes import Shape
from course_lib.validation import pick, positive

COUNTED = ("matrices", "all", "without_embedding")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model.

    Attributes:
        total: every one, a tied matrix once.
        without_embedding: blocks and last norm; neither token and position tables nor the output layer. What Qwen's model
            cards call "non-embedding", and the N of Kaplan et al., arXiv:2001.08361, section 2.1.
        in_products: elements of the matrices that each token is multiplied with: those of the blocks, and the output layer
            whether tied or not; no tables (a lookup costs no FLOP), no norms, no biases.
    """

    total: int
    without_embedding: int
    in_products: int


def parameter_counts(model: str | Shape | Any) -> ParameterCounts:
    """The three counts that people call N.

    Raises:
        ValueError: an unknown preset, or nothing that has widths.
    """
    shape = shape_of(model)
    matrices = sum(rows * columns for rows, columns in shape.block_matrices.values())
    return ParameterCounts(
        shape.parameters,
        shape.parameters - shape.embedding_parameters - shape.head_parameters,
        shape.layers * matrices + shape.vocab * shape.hidden,
    )


def flops_per_token(
    model: str | Shape | Any,
    seq_len: int,
    *,
    recompute: str = "none",
    attention: bool = True,
    causal: bool = False,
    counted: str = "matrices",
    frozen: bool = False,
) -> float:
    """FLOPs of one training step (forward and backward) a token; a multiply-add is two.

    Every weight counted costs 2 forward, 2 for the gradient of its input and 2 for its own: the 6 of "6N". Attention's two
    products cost 4 x layers x keys x (heads x head_dim) forward and twice that backward. With ``counted="matrices"`` and a
    GPT's widths this is 72 L h^2 (1 + s/6h + V/12hL), appendix A of arXiv:2205.05198; with ``recompute="full"`` as well
    96 L h^2 (1 + s/6h + V/16Lh), equation 3 of arXiv:2104.04473. Grouped-query attention and SwiGLU change the matrices,
    not the rule.

    Args:
        model: a preset's name, a Shape, a mapping of widths, a transformers configuration.
        seq_len: tokens a sequence.
        recompute: what hardware does again in backward: "none"; "selective", attention's two products (the core attention
            of arXiv:2205.05198; `estimate`'s "selective" keeps the outputs of all products, so it is "none" here); "full",
            every block, the output layer not.
        attention: count attention's products, which 6N leaves out.
        causal: count the keys that a token may see, (s + 1) / 2 on average; False: all s, as both papers do.
        counted: "matrices", all that multiplies; "all", every parameter (6N); "without_embedding" (6N of the rest).
        frozen: the weights get no gradient of their own, as under LoRA, whose small factors are left out.

    Raises:
        ValueError: an unknown choice, a length below 1.
    """
    pick("recompute", recompute, RECOMPUTE)
    pick("counted", counted, COUNTED)
    positive(seq_len=seq_len)
    shape = shape_of(model)
    blocks, outer = weights_counted(shape, counted)
    passes = 4 if frozen else 6
    total = passes * (blocks + outer) + (2 * blocks if recompute == "full" else 0)
    if attention:
        keys = (seq_len + 1) / 2 if causal else seq_len
        total += (3 if recompute == "none" else 4) * 4 * shape.layers * keys * shape.attention_width
    return float(total)


def weights_counted(shape: Shape, counted: str) -> tuple[int, int]:
    """(weights of the blocks, weights outside of them) under one of COUNTED."""
    if counted == "matrices":
        outer = shape.vocab * shape.hidden
        return parameter_counts(shape).in_products - outer, outer
    blocks = shape.layers * shape.block_parameters
    number = parameter_counts(shape)
    return blocks, (number.total if counted == "all" else number.without_embedding) - blocks
