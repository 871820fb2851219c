"""Lab 3, How ranks talk: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab03.common import lab  # noqa: I001
from course_checks.lab03 import ring, halving, hierarchy, hangs, deciding, exchange  # noqa: F401

__all__ = ["lab"]
