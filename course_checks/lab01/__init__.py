"""Lab 1, where GPU memory goes: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab01.common import lab  # noqa: I001
from course_checks.lab01 import counting, states, activations, logits, moments, searching  # noqa: F401
from course_checks.lab01.choosing import LADDER, MACHINES
from course_checks.lab01 import mending  # noqa: F401

__all__ = ["LADDER", "MACHINES", "lab"]
