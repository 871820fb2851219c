"""What the course needs besides packages: Python, memory, a place to write, a compiler, perhaps the network."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import urllib.error
import urllib.request

from course_lib.units import GIB, MIB
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding
from course_tools.doctor.limits import memory_here

OLDEST, NEWEST = (3, 11), (3, 13)
TRIED = (3, 11)


def python_version(version: tuple[int, ...] | None = None) -> Finding:
    """Check that this Python can run the course; `version` is like sys.version_info, this one's by default."""
    found = tuple(version or sys.version_info)[:3]
    says = f"Python {'.'.join(map(str, found))} on {platform.system()} {platform.machine()}"
    if not OLDEST <= found[:2] <= NEWEST:
        return Finding(
            PROBLEM,
            "Python",
            says,
            "No lesson runs: the course needs Python 3.11, 3.12 or 3.13.",
            "Install one of them, then: make lab PYTHON=python3.12",
        )
    if found[:2] != TRIED:
        return Finding(NOTE, "Python", says, "The tests were run with 3.11; nothing known speaks against this one.")
    return Finding(OK, "Python", says)


def cores() -> Finding:
    """Count the cores that the ranks share."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    says = f"{number} core{'s' if number > 1 else ''}"
    if number < 2:
        return Finding(NOTE, "cores", says, "All ranks share it: every run works and takes two to four times as long.")
    return Finding(OK, "cores", says)


def memory() -> Finding:
    """Check the memory of the machine, or of the container."""
    size = memory_here()
    says = f"{size / GIB:.1f} GiB of memory"
    if size < 6 * GIB:
        return Finding(
            PROBLEM,
            "memory",
            says,
            "Eight ranks (lesson 8) and Axolotl (lesson 7) need about 6 GiB; they may be killed.",
            "Close other programs, or take a machine or container with 8 GiB.",
        )
    return Finding(OK, "memory", says)


def disk(folder: str, name: str, *, needs: int, advice: str) -> Finding:
    """Check the free bytes on the disk of `folder`, or of the nearest folder above it that exists."""
    path = os.path.abspath(os.path.expanduser(folder))
    while not os.path.exists(path):
        path = os.path.dirname(path)
    free = shutil.disk_usage(path).free
    says = f"{free / GIB:.1f} GiB free"
    if free < needs:
        return Finding(PROBLEM, name, says, f"{needs / GIB:.1f} GiB are needed there: saving will fail.", advice)
    return Finding(OK, name, says)


def writable(folder: str, name: str, *, means: str, mend: str) -> Finding:
    """Check that a file can be written in `folder`, which is made if need be."""
    path = os.path.abspath(os.path.expanduser(folder))
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Finding(PROBLEM, name, f"cannot be written: {error.strerror or error}", means, mend)
    return Finding(OK, name, "can be written")


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """Check the size of shared memory, which is often small in containers."""
    if not os.path.isdir(folder):
        return Finding(OK, "shared memory", "this system has no /dev/shm, and needs none")
    size = shutil.disk_usage(folder).total
    says = f"{size / MIB:,.0f} MiB in {folder}"
    if size < 256 * MIB:
        return Finding(
            NOTE,
            "shared memory",
            says,
            "Loaders with worker processes and NCCL use it: on GPUs a run may die with a bus error (lessons 4 to 8).",
            "In Docker: --shm-size=1g, or --ipc=host",
        )
    return Finding(OK, "shared memory", says)


def compiler() -> Finding:
    """Look for a C++ compiler, which DeepSpeed's own kernels need."""
    found = next((path for path in map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++")) if path), None)
    if found is None:
        return Finding(
            NOTE,
            "compiler",
            "there is no C++ compiler",
            "All lessons run; DeepSpeed cannot build its own kernels (CPU Adam, NVMe offload), which lesson 5 does without.",
            "To have them: apt install g++ (Debian, Ubuntu), xcode-select --install (macOS)",
        )
    return Finding(OK, "compiler", os.path.basename(found))


def hub(seconds: float = 4.0) -> Finding:
    """Check that the Hugging Face Hub answers; a refusal by the Hub itself is an answer.

    The course does without it; a learner's own models may need it.
    """
    means = (
        "All lessons run: the models and texts of the course come with its packages. Models of your own need the hub, "
        "or a folder."
    )
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        says = "HF_HUB_OFFLINE is set, so nothing asks it"
        return Finding(NOTE, "hub", says, means, "To use it: unset HF_HUB_OFFLINE")
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=seconds):
            pass
    except urllib.error.HTTPError:
        pass  # it answered
    except (OSError, ValueError):
        mend = "Behind a proxy: set HTTPS_PROXY; with a mirror: HF_ENDPOINT"
        return Finding(NOTE, "hub", f"{address} does not answer", means, mend)
    return Finding(OK, "hub", f"{address} answers")
