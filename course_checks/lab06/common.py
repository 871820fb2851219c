"""What the checks of lab 6 share: the lab itself, tolerances, a rank's collectives between two barriers."""

from __future__ import annotations

import torch

from course_checks.harness.checking import Lab

lab = Lab("06_fsdp", title="FSDP")

TIMEOUT = 15.0  # seconds for one launch; the longest takes a second on two quiet cores, ten on busy ones
# fp32 sums over ranks come in another order than one rank's: 1e-7 a sum, a few hundred sums deep
RTOL, ATOL = 2e-4, 2e-6


def chunk_rows(rows: int, ranks: int, rank: int) -> range:
    """Rows of dimension 0 that ``rank`` keeps, by the rule of torch.chunk, which fully_shard follows."""
    each = -(-rows // ranks)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape != other.shape or not torch.allclose(one, other, rtol=RTOL, atol=ATOL)
