"""What a class needs of one box, one finding each.

Measured once with 8 ranks on CPU, as memory of its own plus its part of what is shared (PSS): a notebook's kernel and
8 ranks took 0.65 GiB before any model, 11 processes and 47 threads with 2 cores.
"""

from __future__ import annotations

import os
import shutil

from course_lib.units import GIB, MIB
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding

MEMORY, MEMORY_OF_LESSON_7 = 2 * GIB, 6 * GIB
RUNS, CACHE = GIB, GIB // 2  # what lessons write beside the notebooks; SmolLM2
VENV_CPU, VENV_CUDA = 3 * GIB, 8 * GIB
SHARED_MEMORY = 128 * MIB
TASKS = 100  # processes and threads of one learner, and one more for each core


def cores(learners: int, number: float) -> Finding:
    """`number`: cores that this box may use, a part of one counts."""
    each = number / learners
    found = f"{number:g} for {learners}: {each:.2g} per learner"
    if each < 0.5:
        means = "When all run a cell with ranks at once, runs end at their timeouts."
        groups = max(2, round(1 / each))
        mend = f"Take a box with {learners} cores or more, or let learners work in groups of {groups}."
        return Finding(PROBLEM, "class: cores", found, means, mend)
    if each < 2:
        means = "Times that lessons measure on CPU ranks differ from run to run; counts and bytes do not."
        return Finding(NOTE, "class: cores", found, means)
    return Finding(OK, "class: cores", found)


def memory(learners: int, size: int) -> Finding:
    """`size`: bytes of memory that are there for all."""
    found = f"{size / GIB:.1f} GiB for {learners}: {size / learners / GIB:.1f} GiB per learner"
    if size < learners * MEMORY:
        means = f"A learner needs {MEMORY // GIB} GiB; with less the system ends somebody's ranks."
        mend = f"Take a box with {learners * MEMORY // GIB} GiB, or at most {size // MEMORY} learners on this one."
        return Finding(PROBLEM, "class: memory", found, means, mend)
    if size < learners * MEMORY_OF_LESSON_7:
        means = f"Lesson 7's Axolotl and lesson 8's eight ranks take up to {MEMORY_OF_LESSON_7 // GIB} GiB."
        mend = f"Let at most {size // MEMORY_OF_LESSON_7} learners at once run those cells."
        return Finding(NOTE, "class: memory", found, means, mend)
    return Finding(OK, "class: memory", found)


def disk(learners: int, free: int, *, cuda: bool) -> Finding:
    """`free`: bytes free where the course lies; `cuda`: its packages are CUDA builds."""
    own = RUNS + CACHE + (VENV_CUDA if cuda else VENV_CPU)
    found = f"{free / GIB:.1f} GiB free for {learners}: {free / learners / GIB:.1f} GiB per learner"
    if free < learners * RUNS + own:
        means = (
            f"Even with one .venv and one cache for all, saving will fail: a learner's runs/ take {RUNS / GIB:g} GiB."
        )
        return Finding(PROBLEM, "class: disk", found, means, "Free some space, or take another disk.")
    if free < learners * own:
        means = f"Not enough for copies with a .venv and a cache each ({own / GIB:.1f} GiB per learner)."
        mend = (
            "Set up one copy of the course; learners get lessons/, labs/ and solutions/ of their own, and open them "
            "with its .venv/bin/jupyter lab, all with BEYOND_ONE_GPU_CACHE=/srv/class/cache"
        )
        return Finding(NOTE, "class: disk", found, means, mend)
    return Finding(OK, "class: disk", found)


def shared_memory(learners: int, size: int | None, gpus: int) -> Finding:
    """`size`: bytes of /dev/shm; None where there is none."""
    if size is None:
        return Finding(OK, "class: /dev/shm", "this system has none, and needs none")
    found = f"{size / MIB:,.0f} MiB for {learners}: {size / learners / MIB:,.0f} MiB per learner"
    if size < learners * SHARED_MEMORY and gpus:
        means = "NCCL and loaders with workers share it: runs of several learners at once die with a bus error."
        mend = f"In Docker: --shm-size={-(-learners * SHARED_MEMORY // GIB)}g, or --ipc=host"
        return Finding(PROBLEM, "class: /dev/shm", found, means, mend)
    return Finding(OK, "class: /dev/shm", found)


def processes(learners: int, account: int | None, box: int | None, number_of_cores: float) -> Finding:
    """`account`: processes and threads that one account may have (ulimit -u); `box`: all of this box; None: no limit."""
    each = TASKS + int(number_of_cores)
    limits = {"per account (ulimit -u)": account, "in this container (pids.max)": box}
    found = ", ".join(f"{limit:,} {where}" for where, limit in limits.items() if limit is not None) or "no limit"
    needs = f"With 8 ranks a learner has about {each} processes and threads, the class {learners * each:,}"
    if box is not None and box < learners * each:
        mend = f"Start the container with --pids-limit {2 * learners * each}"
        return Finding(PROBLEM, "class: tasks", found, f"{needs}: ranks will not start.", mend)
    if account is not None and account < each:
        mend = f"ulimit -u {2 * each}, or in /etc/security/limits.conf"
        return Finding(PROBLEM, "class: tasks", found, f"{needs}: ranks will not start.", mend)
    if account is not None and account < learners * each:
        mend = "Give each learner an account of their own, or raise ulimit -u."
        return Finding(NOTE, "class: tasks", found, f"{needs}.", mend)
    return Finding(OK, "class: tasks", found)


def gpus(learners: int, number: int, leases: str) -> Finding:
    """`number`: GPUs of this box; `leases`: the folder through which they are lent, empty where there is none."""
    if not number:
        return Finding(OK, "class: GPUs", "none: all runs are on CPU ranks, and nobody waits")
    found = f"{number} for {learners}"
    if number >= 2 * learners:
        return Finding(OK, "class: GPUs", f"{found}: two each at the same time")
    at_once = f"{min(number, learners)} at once with one each"
    at_once += f", {number // 2} with two each" if number > 1 else "; a run with two does not fit"
    at_once += f"; in turns of one everybody has had a GPU after {-(-learners // number)} runs"
    if not leases:
        means = f"They are not lent, so all runs crowd onto the first ones. Lent: {at_once}."
        return Finding(NOTE, "class: GPUs", found, means, f"beyond class gpus init /var/tmp/gpus --gpus {number}")
    if not (os.path.isdir(leases) and os.access(leases, os.W_OK | os.X_OK)):
        found += f", lent through {leases}, which is no folder that can be written"
        mend = f"beyond class gpus init {leases} --gpus {number}"
        return Finding(PROBLEM, "class: GPUs", found, "No run gets its turn.", mend)
    return Finding(OK, "class: GPUs", f"{found}, lent through {leases}: {at_once}")


def size_of_shared_memory() -> int | None:
    """Bytes of /dev/shm, None where there is none."""
    return shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
