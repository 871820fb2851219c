"""Does a Llama's config split over tensor-parallel ranks? One sentence for each number that does not divide."""

from __future__ import annotations

from typing import Any


def check_split(config: Any, ranks: int, *, seq_len: int = 0, sequence_parallel: bool = False) -> None:
    """Every rank gets as many heads, kv heads, columns of the MLP and rows of the vocabulary as every other.

    Args:
        config: a transformers config, such as ``model.config``.
        ranks: tensor-parallel ranks.
        seq_len: tokens a sequence, which sequence parallelism cuts too; 0 where it is not known yet.

    Raises:
        ValueError: a number that does not divide; which, and what would.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} tensor-parallel ranks: give a whole number of at least 1.")
    widths = {
        "attention heads": config.num_attention_heads,
        "kv heads": config.num_key_value_heads,
        "columns of the MLP (intermediate_size)": config.intermediate_size,
        "tokens of the vocabulary": config.vocab_size,
    }
    for what, number in widths.items():
        if number % ranks:
            raise ValueError(
                f"{number} {what} do not divide over {ranks} tensor-parallel ranks: take one of "
                f"{', '.join(map(str, _divisors(config)))} ranks{_advice(what, number, ranks)}."
            )
    if sequence_parallel and seq_len % ranks:
        raise ValueError(
            f"seq_len={seq_len} does not divide over {ranks} ranks, and sequence parallelism cuts the sequence: "
            f"take {seq_len // ranks * ranks or ranks} tokens, or leave it out."
        )


def _divisors(config: Any) -> list[int]:
    """Numbers of ranks that all of the widths divide over."""
    widths = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.vocab_size)
    return [n for n in range(1, min(widths) + 1) if not any(width % n for width in widths)]


def _advice(what: str, number: int, ranks: int) -> str:
    if what.startswith("tokens"):
        return f", or pad the vocabulary to {-(-number // ranks) * ranks}"
    return ""
