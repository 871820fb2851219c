"""`Outcome` lives with `Observation`, which makes it."""

from course_lib.observe import Outcome

__all__ = ["Outcome"]
