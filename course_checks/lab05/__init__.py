"""Lab 5, DeepSpeed ZeRO: what each of its exercises must show. The order of the imports is that of the exercises."""

from course_checks.lab05.common import lab  # noqa: I001
from course_checks.lab05 import (  # noqa: F401
    stages,
    parting,
    own_optimizer,
    gradients,
    resharding,
    choosing,
    mending,
)  # fmt: skip

__all__ = ["lab"]
