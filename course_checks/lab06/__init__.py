"""Lab 6, FSDP: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab06.common import lab  # noqa: I001
from course_checks.lab06 import own_unit, loading, broken, clipping, tracing, capstone, hybrid  # noqa: F401

__all__ = ["lab"]
