"""Every picture of the course, in one look. Each function takes numbers and returns a picture with its text."""

from course_lib.figures.links import fitted_curve
from course_lib.figures.memory import (
    against_cards,
    allocated_and_reserved,
    segments,
    stacked_against_cards,
    step_memory,
)
from course_lib.figures.training import timeline
from course_lib.units import nice_bytes

__all__ = [
    "against_cards",
    "allocated_and_reserved",
    "fitted_curve",
    "nice_bytes",
    "segments",
    "stacked_against_cards",
    "step_memory",
    "timeline",
]
