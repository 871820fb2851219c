"""Lab 4, DDP with Accelerate: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab04.common import lab  # noqa: I001
from course_checks.lab04 import accumulation, sixteen_bits, buckets, blind, capstone, uneven  # noqa: F401

__all__ = ["lab"]
