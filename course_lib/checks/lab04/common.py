"""What the checks of lab 4 share: the lab itself, tolerances, and reading a run's collectives."""

from __future__ import annotations

import torch

from course_lib.checking import Lab
from course_lib.launch import Run
from course_lib.observe import Collective

lab = Lab("04_ddp_accelerate", title="DDP with Accelerate")

# fp32 sums over ranks come in another order than one rank's: 1e-7 a sum, a few hundred sums deep
RTOL, ATOL = 2e-4, 2e-6


def phases(run: Run, rank: int) -> list[list[Collective]]:
    """A rank's collectives cut at its barriers."""
    cut: list[list[Collective]] = [[]]
    for collective in run.collectives:
        if collective.rank == rank:
            if collective.kind == "barrier":
                cut.append([])
            else:
                cut[-1].append(collective)
    return cut


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return any(not torch.allclose(one[name], other[name], rtol=RTOL, atol=ATOL) for name in other)
