"""Every picture of the course, in one look. Each function takes numbers and returns a picture with its text."""

from course_lib.figures.links import bandwidth_curve
from course_lib.figures.memory import against_card, memory_over_time, reserved_and_allocated, segments
from course_lib.figures.training import bars, losses, throughput, timeline
from course_lib.units import nice_bytes

__all__ = [
    "against_card",
    "bandwidth_curve",
    "bars",
    "losses",
    "memory_over_time",
    "nice_bytes",
    "reserved_and_allocated",
    "segments",
    "throughput",
    "timeline",
]
