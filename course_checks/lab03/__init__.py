"""Lab 3, how ranks talk: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab03.common import lab  # noqa: I001
from course_checks.lab03 import ring, scattering, gathering, tree  # noqa: F401
from course_checks.lab03 import grid, cost, diagnosis  # noqa: F401

__all__ = ["lab"]
