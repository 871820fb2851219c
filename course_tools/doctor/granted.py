"""What the container, or else the machine, grants this process: cores, memory, processes."""

from __future__ import annotations

import os
from pathlib import Path


def cores_here(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that this process may use: its affinity, or what the container is given where that is less."""
    number = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _first_line(groups / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_first_line(groups / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return min(number, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else number


def memory_here(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory of this box, or what the container is given where that is less."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given = [_first_line(groups / path) for path in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([size, *(int(limit) for limit in given if limit.isdigit())])


def tasks_here(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processes and threads that the container may have; None for no limit."""
    given = _first_line(groups / "pids.max") or _first_line(groups / "pids" / "pids.max")
    return int(given) if given.isdigit() else None


def _first_line(path: Path) -> str:
    """What the kernel says there; empty where there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
