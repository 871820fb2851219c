"""Check that a Llama splits over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from course_lib.choices import Widths, why_not_tensor_parallel


def check_split(config: Any, ranks: int, *, seq_len: int = 0, sequence_parallel: bool = False) -> None:
    """Check that heads, kv heads, columns of the MLP and rows of the vocabulary divide evenly over the ranks.

    Args:
        config: a transformers config, such as ``model.config``.
        ranks: tensor-parallel ranks.
        seq_len: tokens a sequence, which sequence parallelism splits, too; 0 if not known yet.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if reason := why_not_tensor_parallel(Widths(heads, kv_heads, config.intermediate_size, config.vocab_size), ranks):
        raise ValueError(reason)
    if sequence_parallel and seq_len % ranks:
        raise ValueError(
            f"seq_len={seq_len} does not divide over {ranks} ranks, and sequence parallelism cuts the sequence: "
            f"take {seq_len // ranks * ranks or ranks} tokens, or leave it out."
        )
