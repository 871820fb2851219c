"""Lab 5, ZeRO: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab05.common import lab  # noqa: I001
from course_checks.lab05 import stepping, resharding, choosing, silent, capstone, mending, whole  # noqa: F401

__all__ = ["lab"]
