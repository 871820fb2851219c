"""Lab 7, Axolotl: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab07.common import lab  # noqa: I001
from course_checks.lab07 import saves, resuming, files, saving_plan, capstone, slurm  # noqa: F401

__all__ = ["lab"]
