"""Lab 8, 3D parallelism: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab08.common import lab  # noqa: I001
from course_checks.lab08 import mlp, vocabulary, schedule, grid, bubble, merging, planning  # noqa: F401

__all__ = ["lab"]
