"""Lab 4, data parallelism: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab04.common import lab  # noqa: I001
from course_checks.lab04 import own_ddp, accumulation, batches, planted_bugs  # noqa: F401

__all__ = ["lab"]
