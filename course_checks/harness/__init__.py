"""What all checks share: the contract, the guard, comparisons, fresh values, and running a learner's code on ranks."""

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
    ratio_hint,
    returned,
    same,
)
from course_checks.harness.guard import snapshot, time_limit, unchanged, without_limit
from course_checks.harness.mistakes import explains, named_mistake
from course_checks.harness.ranks import TIMEOUT, phases, run_ranks, sent_between
from course_checks.harness.tensors import LiveTensors, bytes_behind_views, live_bytes, settled_bytes, tensors_in
from course_checks.harness.values import fresh, fresh_seed, named_seed

__all__ = [
    "ATOL",
    "RTOL",
    "TIMEOUT",
    "Exercise",
    "Lab",
    "LiveTensors",
    "NotYet",
    "Verdict",
    "bytes_behind_views",
    "close",
    "explains",
    "fresh",
    "fresh_seed",
    "in_bytes",
    "judge",
    "live_bytes",
    "named_mistake",
    "named_seed",
    "nothing",
    "number",
    "phases",
    "plain",
    "ratio_hint",
    "returned",
    "run_ranks",
    "same",
    "sent_between",
    "settled_bytes",
    "snapshot",
    "tensors_in",
    "time_limit",
    "unchanged",
    "without_limit",
]
