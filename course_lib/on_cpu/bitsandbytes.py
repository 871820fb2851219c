"""Unpack NF4 rightly on every CPU: a mistake in bitsandbytes' AVX-512 kernel, worked around where it is there.

bitsandbytes 0.50.2 reads `columns // 64` scales per row (csrc/cpu_ops.cpp), so a matrix whose rows are not whole blocks of
64 weights comes back with the scales of other blocks: an error two to three times that of NF4. CPUs without AVX-512 run
another branch, which is right. GPUs are not affected.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from math import prod
from typing import Any

import torch

OPERATOR = "bitsandbytes::dequantize_4bit"


@functools.cache
def prepare_bitsandbytes() -> bool:
    """Replace the CPU kernel of this process if it is wrong, and keep PEFT's remarks off the page.

    Call it once bitsandbytes is wanted. Returns whether the kernel was wrong.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, once PEFT imports it, logs what it looks for
    # PEFT uses transformers' old names; nobody on the page can act on that
    warnings.filterwarnings("ignore", "`(is_gradient_checkpointing|gradient_checkpointing_enable)` is", FutureWarning)
    # on CPUs with AVX512-BF16 it would fetch a kernel from the hub, and logs that it cannot
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes.functional as F

    block = 64
    row = torch.linspace(0.01, 1.0, 4 * 96).reshape(
        4, 96
    )  # four rows of a block and a half; each block has its own scale
    packed, state = F.quantize_4bit(row, blocksize=block, quant_type="nf4")
    whole = (packed, state.absmax, block, "nf4", (row.numel() // block, block), row.dtype)
    if torch.equal(F.dequantize_4bit(packed, state), torch.ops.bitsandbytes.dequantize_4bit(*whole).reshape(row.shape)):
        return False
    original = torch.library.get_kernel(OPERATOR, "CPU")

    def by_blocks(
        keys: torch.DispatchKeySet, packed: Any, scales: Any, block: int, kind: str, shape: Any, dtype: Any
    ) -> Any:
        rows_are_blocks = shape[-1] % block == 0 or prod(shape) % block
        unpacked = shape if rows_are_blocks else (prod(shape) // block, block)
        return original.call_boxed(keys, packed, scales, block, kind, unpacked, dtype).reshape(tuple(shape))

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="(?s).*Overriding a previously registered kernel", category=UserWarning
        )
        _LIBRARY.impl(OPERATOR.split("::")[1], by_blocks, "CPU", with_keyset=True, allow_override=True)
    return True


_LIBRARY = torch.library.Library("bitsandbytes", "IMPL")  # an override lasts as long as its library object
