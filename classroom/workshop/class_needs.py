"""What a class needs of one box, one finding each; what a learner takes was measured once, with 8 ranks on CPU.

Measured as memory that no other process shares plus its part of what is shared (PSS): a notebook's kernel and 8 ranks
took 0.65 GiB before any model, 11 processes, 47 threads with 2 cores, and 42 open files in the busiest process.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence

from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding

GIB = 2**30
MEMORY, MEMORY_OF_LESSON_7 = 2 * GIB, 6 * GIB
RUNS, CACHE = GIB, GIB // 2  # what lessons write beside the notebooks; SmolLM2
VENV_CPU, VENV_CUDA = 3 * GIB, 8 * GIB
SHARED_MEMORY = 128 * 2**20
TASKS = 100  # processes and threads of one learner, and one more for each core
FIRST_PORT, JUPYTER_TRIES = 8888, 50


def cores(learners: int, number: float) -> Finding:
    """`number`: cores that this box may use, a part of one counts."""
    each = number / learners
    says = f"{number:g} for {learners}: {each:.2g} a learner"
    if each < 0.5:
        return Finding(
            PROBLEM, "class: cores", says, "When all run a cell with ranks at once, runs end at their timeouts.",
            f"Take a box with {learners} cores or more, or let learners work in groups of {max(2, round(1 / each))}.",
        )  # fmt: skip
    if each < 2:
        return Finding(NOTE, "class: cores", says, "Times that lessons measure on CPU ranks differ from run to run; counts and bytes do not.")  # fmt: skip
    return Finding(OK, "class: cores", says)


def memory(learners: int, size: int) -> Finding:
    """`size`: bytes of memory that are there for all."""
    says = f"{size / GIB:.1f} GiB for {learners}: {size / learners / GIB:.1f} GiB a learner"
    if size < learners * MEMORY:
        return Finding(
            PROBLEM, "class: memory", says, f"A learner needs {MEMORY // GIB} GiB; with less the system ends somebody's ranks.",
            f"Take a box with {learners * MEMORY // GIB} GiB, or at most {size // MEMORY} learners on this one.",
        )  # fmt: skip
    if size < learners * MEMORY_OF_LESSON_7:
        return Finding(
            NOTE, "class: memory", says, f"Lesson 7's Axolotl and lesson 8's eight ranks take up to {MEMORY_OF_LESSON_7 // GIB} GiB.",
            f"Let at most {size // MEMORY_OF_LESSON_7} learners at once run those cells.",
        )  # fmt: skip
    return Finding(OK, "class: memory", says)


def disk(learners: int, free: int, *, cuda: bool) -> Finding:
    """`free`: bytes free where the course lies; `cuda`: its packages are CUDA builds."""
    own = RUNS + CACHE + (VENV_CUDA if cuda else VENV_CPU)
    says = f"{free / GIB:.1f} GiB free for {learners}: {free / learners / GIB:.1f} GiB a learner"
    share = (
        "Set up one copy of the course; learners get lessons/, labs/ and solutions/ of their own, and open them with its "
        ".venv/bin/jupyter lab, all with BEYOND_ONE_GPU_CACHE=/srv/class/cache"
    )
    if free < learners * RUNS + own:
        return Finding(PROBLEM, "class: disk", says, "Even with one .venv and one cache for all, saving will fail: "
                       f"each lesson's runs/ may take {RUNS / GIB:g} GiB.", "Free some space, or take another disk.")  # fmt: skip
    if free < learners * own:
        return Finding(
            NOTE, "class: disk", says, f"Not enough for copies with a .venv and a cache each ({own / GIB:.1f} GiB a learner).", share
        )  # fmt: skip
    return Finding(OK, "class: disk", says)


def shared_memory(learners: int, size: int | None, gpus: int) -> Finding:
    """`size`: bytes of /dev/shm; None where there is none."""
    if size is None:
        return Finding(OK, "class: /dev/shm", "this system has none, and needs none")
    says = f"{size / 2**20:,.0f} MiB for {learners}: {size / learners / 2**20:,.0f} MiB a learner"
    if size < learners * SHARED_MEMORY and gpus:
        return Finding(
            PROBLEM, "class: /dev/shm", says, "NCCL and loaders with workers share it: runs of several learners at once die with a bus error.",
            f"In Docker: --shm-size={-(-learners * SHARED_MEMORY // GIB)}g, or --ipc=host",
        )  # fmt: skip
    if size < learners * SHARED_MEMORY:
        return Finding(NOTE, "class: /dev/shm", says, "The lessons on CPU ranks hardly use it; loaders with workers of a learner's own do.")  # fmt: skip
    return Finding(OK, "class: /dev/shm", says)


def open_files(limit: int | None) -> Finding:
    """`limit`: open files of one process (ulimit -n); None for no limit."""
    says = "no limit" if limit is None else f"{limit:,} a process (ulimit -n)"
    if limit is not None and limit < 256:
        return Finding(PROBLEM, "class: files", says, "A JupyterLab with some notebooks open needs more, and then loses its kernels.",
                       "Before it starts: ulimit -n 4096")  # fmt: skip
    if limit is not None and limit < 1024:
        return Finding(NOTE, "class: files", says, "Enough for one notebook a learner; a JupyterLab for the whole class needs more.",
                       "Before it starts: ulimit -n 4096")  # fmt: skip
    return Finding(OK, "class: files", says)


def processes(learners: int, account: int | None, box: int | None, number_of_cores: float) -> Finding:
    """`account`: processes and threads that one account may have (ulimit -u); `box`: all of this box; None: no limit."""
    each = TASKS + int(number_of_cores)
    words = [f"{limit:,} {of}" for limit, of in ((account, "an account (ulimit -u)"), (box, "in this container (pids.max)")) if limit is not None]  # fmt: skip
    says, needs = (
        ", ".join(words) or "no limit",
        f"With 8 ranks a learner has about {each} processes and threads, the class {learners * each:,}",
    )
    if box is not None and box < learners * each:
        return Finding(PROBLEM, "class: tasks", says, f"{needs}: ranks will not start.", f"Start the container with --pids-limit {2 * learners * each}")  # fmt: skip
    if account is not None and account < each:
        return Finding(PROBLEM, "class: tasks", says, f"{needs}: ranks will not start.", f"ulimit -u {2 * each}, or in /etc/security/limits.conf")  # fmt: skip
    if account is not None and account < learners * each:
        return Finding(NOTE, "class: tasks", says, f"{needs}.", "Give each learner an account of their own, or raise ulimit -u.")  # fmt: skip
    return Finding(OK, "class: tasks", says)


def gpus(learners: int, number: int, leases: str) -> Finding:
    """`number`: GPUs of this box; `leases`: the folder through which they are lent, empty where there is none."""
    if not number:
        return Finding(OK, "class: GPUs", "none: all runs are on CPU ranks, and nobody waits")
    says = f"{number} for {learners}"
    if number >= 2 * learners:
        return Finding(OK, "class: GPUs", f"{says}: two each at the same time")
    most = f"{min(number, learners)} at once with one each" + (
        f", {number // 2} with two each" if number > 1 else "; a run with two does not fit"
    )
    most += f"; in turns of one everybody has had a GPU after {-(-learners // number)} runs"
    if not leases:
        return Finding(NOTE, "class: GPUs", says, f"They are not lent, so all runs crowd onto the first ones. Lent: {most}.",
                       f"beyond class gpus init /var/tmp/gpus --gpus {number}")  # fmt: skip
    if not (os.path.isdir(leases) and os.access(leases, os.W_OK | os.X_OK)):
        return Finding(PROBLEM, "class: GPUs", f"{says}, lent through {leases}, which is no folder that can be written", "No run gets its turn.",
                       f"beyond class gpus init {leases} --gpus {number}")  # fmt: skip
    return Finding(OK, "class: GPUs", f"{says}, lent through {leases}: {most}")


def ports(learners: int, busy: Sequence[int]) -> Finding:
    """`busy`: those of FIRST_PORT and what JupyterLab tries after it that are taken already."""
    tried = learners + JUPYTER_TRIES
    if tried - len(busy) < learners:
        return Finding(PROBLEM, "class: ports", f"{len(busy)} of {FIRST_PORT} to {FIRST_PORT + tried - 1} are taken",
                       "Not every learner's JupyterLab finds one.", "End what listens there (ss -ltnp), or give each a port: make lab LAB_ARGS='--port 9001'")  # fmt: skip
    if busy:
        some = ", ".join(map(str, busy[:5])) + (" …" if len(busy) > 5 else "")
        return Finding(NOTE, "class: ports", f"taken: {some}", "JupyterLab takes the next free one; learners' addresses differ from their number in the class.")  # fmt: skip
    return Finding(OK, "class: ports", f"{FIRST_PORT} to {FIRST_PORT + learners - 1} are free for JupyterLab")


def busy_ports(learners: int) -> list[int]:
    """Ports on 127.0.0.1 that JupyterLab would try and nobody can have any more."""
    busy = []
    for port in range(FIRST_PORT, FIRST_PORT + learners + JUPYTER_TRIES):
        with socket.socket() as one:
            one.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as JupyterLab: one that was closed just now is free
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                busy.append(port)
    return busy


def free_shared_memory() -> int | None:
    """Bytes of /dev/shm, None where there is none."""
    return shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
