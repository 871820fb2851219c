"""Activation checkpointing: free what a block computed, and recompute it in the backward pass (Chen et al., arXiv:1604.06174).

"full" keeps only the input of each block. "selective" also keeps what is expensive to recompute, the products with weights
and the attention kernel's result, and recomputes the cheap steps (norms, rotary, SwiGLU, casts, sums). The T x T scores of
eager attention are recomputed, too: the selective recomputation of Korthikanti et al. (arXiv:2205.05198)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SHORT = 64  # a result of a product over so few numbers is cheap to have again: LoRA's B(...), as wide as the layer

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_FOUR_BIT_PRODUCT = "bitsandbytes::gemm_4bit"  # by name: bitsandbytes is not imported for models that do not need it
_ATTENTION = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


def set_checkpointing(model: Any, kind: str) -> None:
    """Checkpoint every block of a transformers model (also one in PEFT's wrapper) the "none", "selective" or "full" way."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    # renamed within transformers 5; the old names warn where there are new ones
    prefix = "activation" if hasattr(base, "activation_checkpointing_enable") else "gradient"
    if kind == "none":
        if getattr(base, f"is_{prefix}_checkpointing"):
            getattr(base, f"{prefix}_checkpointing_disable")()
        return
    how: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, keep_what_was_dear)
    getattr(base, f"{prefix}_checkpointing_enable")(how)
    # transformers has now made the embedding's output ask for a gradient, which reentrant checkpointing needs (it trains
    # nothing in a block whose input asks for none, and with LoRA no input does). The kind used here looks at the
    # weights inside the block, so that gradient would be computed for nobody.
    base.disable_input_require_grads()


def keep_what_was_dear(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of "selective", asked for every operation of a block; `args` are that operation's."""
    if op in _ATTENTION or op.name() == _FOUR_BIT_PRODUCT:
        return CheckpointPolicy.MUST_SAVE
    if op in _PRODUCTS and args[-1].shape[0] > SHORT:  # (rows, inner) @ (inner, columns)
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
