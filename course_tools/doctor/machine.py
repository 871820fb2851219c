"""What the course needs before any package: Python, a place to write, memory, a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile

from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding
from course_tools.doctor.granted import memory_here

GIB = 2**30
OLDEST, NEWEST = (3, 11), (3, 13)
TRIED = (3, 11)


def python_version(version: tuple[int, ...] | None = None) -> Finding:
    """Whether this Python can run the course; `version` as sys.version_info, this one's by default."""
    found = tuple(version or sys.version_info)[:3]
    says = f"Python {'.'.join(map(str, found))} on {platform.system()} {platform.machine()}"
    if not OLDEST <= found[:2] <= NEWEST:
        return Finding(
            PROBLEM, "Python", says, "No lesson runs: the course needs Python 3.11, 3.12 or 3.13.",
            "Install one of them, then: make lab PYTHON=python3.12",
        )  # fmt: skip
    if found[:2] != TRIED:
        return Finding(NOTE, "Python", says, "The tests were run with 3.11; nothing known speaks against this one.")
    return Finding(OK, "Python", says)


def cores() -> Finding:
    """How many cores the ranks share."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    says = f"{number} core{'s' if number > 1 else ''}"
    if number < 2:
        return Finding(NOTE, "cores", says, "All ranks share it: every run works and takes two to four times as long.")
    return Finding(OK, "cores", says)


def memory() -> Finding:
    """Memory of the machine, or of the container where the kernel tells it."""
    size = memory_here()
    says = f"{size / GIB:.1f} GiB of memory"
    if size < 6 * GIB:
        return Finding(
            PROBLEM, "memory", says, "Eight ranks (lesson 8) and Axolotl (lesson 7) need about 6 GiB; they may be killed.",
            "Close other programs, or take a machine or container with 8 GiB.",
        )  # fmt: skip
    return Finding(OK, "memory", says)


def disk(folder: str, name: str, *, needs: int, advice: str) -> Finding:
    """Free bytes where `folder`, or the nearest folder above it that exists, lies."""
    there = os.path.abspath(os.path.expanduser(folder))
    while not os.path.exists(there):
        there = os.path.dirname(there)
    free = shutil.disk_usage(there).free
    says = f"{free / GIB:.1f} GiB free"
    if free < needs:
        return Finding(PROBLEM, name, says, f"{needs / GIB:.1f} GiB are needed there: saving will fail.", advice)
    return Finding(OK, name, says)


def writable(folder: str, name: str, *, means: str, mend: str) -> Finding:
    """Whether a file can be made in `folder`, or the folder itself."""
    there = os.path.abspath(os.path.expanduser(folder))
    try:
        os.makedirs(there, exist_ok=True)
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Finding(PROBLEM, name, f"cannot be written: {error.strerror or error}", means, mend)
    return Finding(OK, name, "can be written")


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """Shared memory, which containers are often given little of."""
    if not os.path.isdir(folder):
        return Finding(OK, "shared memory", "this system has no /dev/shm, and needs none")
    size = shutil.disk_usage(folder).total
    says = f"{size / 2**20:,.0f} MiB in {folder}"
    if size < 256 * 2**20:
        return Finding(
            NOTE, "shared memory", says,
            "Loaders with worker processes and NCCL use it: on GPUs a run may die with a bus error (lessons 4 to 8).",
            "In Docker: --shm-size=1g, or --ipc=host",
        )  # fmt: skip
    return Finding(OK, "shared memory", says)


def compiler() -> Finding:
    """A C++ compiler, which DeepSpeed's own kernels want."""
    found = next((path for path in map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++")) if path), None)
    if found is None:
        return Finding(
            NOTE, "compiler", "there is no C++ compiler",
            "All lessons run; DeepSpeed cannot build its own kernels (CPU Adam, NVMe offload), which lesson 5 does without.",
            "To have them: apt install g++ (Debian, Ubuntu), xcode-select --install (macOS)",
        )  # fmt: skip
    return Finding(OK, "compiler", os.path.basename(found))
