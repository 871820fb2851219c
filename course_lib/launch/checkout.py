"""The checkout that this course_lib belongs to: ranks and commands run its code, and no other checkout's.

Another one may be installed in the environment, and be what a fresh interpreter finds first.
"""

from __future__ import annotations

import os
import sys

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the folder of course_lib


def python_path() -> str:
    """Return a PYTHONPATH with which another process imports what this one does, from this checkout first."""
    return os.pathsep.join(dict.fromkeys([CHECKOUT, *(p for p in sys.path if p)]))


def rank_path() -> list[str]:
    """Return sys.path for a rank: this process's own, and this checkout at its end where an installer hid it from there."""
    return [*sys.path] if CHECKOUT in sys.path else [*sys.path, CHECKOUT]


def patience(seconds: float) -> float:
    """Seconds until something counts as hung: those given, or BEYOND_ONE_GPU_TIMEOUT where that is more (a busy machine)."""
    return max(seconds, float(os.environ.get("BEYOND_ONE_GPU_TIMEOUT", 0)))
