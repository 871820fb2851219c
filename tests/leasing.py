"""What the tests of the leases share: fast processes, patience, and who holds what."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from course_lib.launch.leases import Pool

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 120.0  # seconds that a condition may take before a test fails


def python(program: str, *arguments: object, **more) -> subprocess.Popen:
    """A process that starts in a tenth of a second: nothing but the standard library and the course."""
    return subprocess.Popen([sys.executable, "-S", "-c", program, *map(str, arguments)], cwd=ROOT, **more)


def until(condition, patience: float = PATIENCE):
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
    return found


def names(leases: Pool) -> list[str]:
    return [holder.name for holder in leases.holders()]
