"""Lab 1, out of memory: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab01.common import lab  # noqa: I001
from course_checks.lab01 import timelines, chunked, mending, counted, fitting, rollouts  # noqa: F401

__all__ = ["lab"]
