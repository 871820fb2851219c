"""What the tests of processes share: fast ones, patience, and whether they still run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 120.0  # seconds that a condition may take before a test fails


def python(program: str, *arguments: object, **more) -> subprocess.Popen:
    """A process that starts in a tenth of a second: nothing but the standard library and the course."""
    return subprocess.Popen([sys.executable, "-S", "-c", program, *map(str, arguments)], cwd=ROOT, text=True, **more)


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def runs(process: int | psutil.Process) -> bool:
    """Whether a process is alive; a number may by now be another process's, a `psutil.Process` may not."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
