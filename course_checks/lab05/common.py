"""What the checks of lab 5 share: the lab itself, tolerances, a launch, a run's collectives, and sizes in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness.checking import Lab, NotYet
from course_lib.launch import RankFailed, Run, launch

lab = Lab("05_deepspeed_zero", title="DeepSpeed ZeRO")

TIMEOUT = 15.0  # seconds; the longest of these programs takes a tenth of it on two busy cores
# Sums over ranks come in another order than one rank's: 1e-7 a sum in fp32, and Adam's division makes the most of it.
RTOL, ATOL = 2e-4, 2e-6
# Bytes a rank may hold beyond what it is asked to: step counters, padding of each tensor where somebody shards so.
SLACK = 512


def run(program: Callable[..., Any], *args: Any, ranks: int) -> Run:
    """Launch ``program`` on gloo ranks. Raises NotYet where ranks sent vectors of different lengths."""
    try:
        return launch(program, *args, ranks=ranks, timeout=TIMEOUT, backend="gloo", threads=1, quiet=True)
    except RankFailed as failed:
        if failed.cause_type == "SIGABRT" or "invalid tensor size" in failed.cause_message:
            raise NotYet(
                f"on {ranks} ranks the ranks come to a collective with vectors of different lengths: every rank must send "
                "slices of the same length. Pad the flat vector until it divides by the ranks, and give every trainable "
                "parameter its place in it on every rank, also one that has no .grad there"
            ) from failed
        raise


def slots(elements: int, ranks: int) -> int:
    """Elements of one rank's slice of a flat vector that is padded until it divides by the ranks."""
    return -(-elements // ranks)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=RTOL, atol=ATOL)


def in_bytes(count: float) -> str:
    return f"{count:,.0f} bytes"
