"""What the checks of lab 4 share: the lab itself, tolerances, and reading a run's collectives."""

from __future__ import annotations

import torch

from course_checks.harness.checking import Lab

lab = Lab("04_ddp_accelerate", title="DDP with Accelerate")

# fp32 sums over ranks come in another order than one rank's: 1e-7 a sum, a few hundred sums deep
RTOL, ATOL = 2e-4, 2e-6


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return any(not torch.allclose(one[name], other[name], rtol=RTOL, atol=ATOL) for name in other)
