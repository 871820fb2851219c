"""Lab 8, 3D parallelism: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab08.common import lab  # noqa: I001
from course_checks.lab08 import half_block, schedule, mesh, hangs, planning, experts, ring  # noqa: F401

__all__ = ["lab"]
