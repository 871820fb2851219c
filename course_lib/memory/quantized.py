"""Bytes of quantized tensors: NF4 weights and 8-bit optimizer states, as bitsandbytes stores them."""

from __future__ import annotations

NF4_BLOCK, SECOND_BLOCK = 64, 256  # weights an absmax, absmaxes a second constant: arXiv:2305.14314, section 3
STATE_BLOCK = 256  # elements an absmax of an 8-bit optimizer state
SMALL_TENSOR = 4096  # elements below which bitsandbytes keeps a state in fp32 (its min_8bit_size)


def blocks(elements: int, size: int) -> int:
    return -(-elements // size)


def nf4_bytes(elements: int) -> int:
    """Bytes of one NF4 matrix with double quantization: codes, one absmax for 64 of them, a table of 16 fp32 levels.

    The absmaxes are themselves 8-bit codes with one fp32 constant for 256 of them, their mean, and a table of 256 levels.
    bitsandbytes keeps both tables once a matrix.
    """
    codes, first = blocks(elements, 2) + 4 * 16, blocks(elements, NF4_BLOCK)
    return codes + first + 4 * blocks(first, SECOND_BLOCK) + 4 + 4 * 256


def adam8bit_bytes(elements: int) -> int:
    """Bytes of both Adam states of one tensor: a byte an element and an fp32 absmax a block; fp32 for small tensors."""
    if elements < SMALL_TENSOR:
        return 8 * elements
    return 2 * (elements + 4 * blocks(elements, STATE_BLOCK))
