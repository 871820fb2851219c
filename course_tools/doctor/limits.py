"""What this process may use of the machine, or of its container: cores, memory, processes."""

from __future__ import annotations

import os
from pathlib import Path


def cores_here(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the cores that this process may use: its affinity, or the container's quota if that is less."""
    number = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _first_line(groups / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_first_line(groups / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return min(number, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else number


def memory_here(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this machine, or the container's limit if that is less."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = [_first_line(groups / path) for path in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([size, *(int(limit) for limit in given if limit.isdigit())])


def _first_line(path: Path) -> str:
    """Read a file of the kernel; empty if there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
