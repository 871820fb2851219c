"""What all checks share: the contract, the guard, comparisons, fresh values, and running a learner's code on ranks."""

import importlib
from typing import Any

from course_checks.harness.checking import Exercise, Lab, Verdict, judge
from course_checks.harness.comparing import (
    ATOL,
    RTOL,
    NotYet,
    close,
    in_bytes,
    nothing,
    number,
    plain,
    returned,
    same,
)
from course_checks.harness.contract import Contract, gives, slip_hints
from course_checks.harness.guard import refused, snapshot, time_limit, unchanged, without_limit
from course_checks.harness.parts import healthy_untouched, put_together
from course_checks.harness.ranks import TIMEOUT, on_link, phases, run_ranks

__all__ = [
    "ATOL",
    "Contract",
    "gives",
    "healthy_untouched",
    "RTOL",
    "TIMEOUT",
    "Exercise",
    "Lab",
    "LiveTensors",
    "NotYet",
    "Verdict",
    "bytes_behind_views",
    "close",
    "fresh",
    "fresh_seed",
    "in_bytes",
    "judge",
    "learnable_tokens",
    "live_bytes",
    "named_seed",
    "nothing",
    "number",
    "on_link",
    "phases",
    "plain",
    "put_together",
    "refused",
    "returned",
    "run_ranks",
    "same",
    "settled_bytes",
    "slip_hints",
    "snapshot",
    "tensors_in",
    "time_limit",
    "unchanged",
    "without_limit",
]

_WITH_TORCH = {
    "tensors": ("LiveTensors", "bytes_behind_views", "live_bytes", "settled_bytes", "tensors_in"),
    "values": ("fresh", "fresh_seed", "learnable_tokens", "named_seed"),
}


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch when it is first asked for: a score is shown without it."""
    for module, names in _WITH_TORCH.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
