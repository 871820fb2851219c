"""``beyond class preflight --learners 16``: whether this box carries a class.

What the doctor finds for one learner comes first, then what many at once add: cores, memory, disk, GPUs.
With 8 ranks on CPU, a notebook's kernel and its ranks took 0.65 GiB before any model.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence

from course_lib.launch.leases import COUNT_VARIABLE, FOLDER_VARIABLE, count_gpus
from course_lib.notebook.contents import ROOT
from course_lib.units import GIB
from course_tools.command_line import ArgumentParser, reports_errors
from course_tools.doctor import examine
from course_tools.doctor.command import report
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding
from course_tools.doctor.gpus import driver
from course_tools.doctor.limits import cores_here, memory_here

MEMORY, MEMORY_OF_LESSON_7 = 2 * GIB, 6 * GIB
RUNS, CACHE = GIB, GIB // 2  # what lessons write beside the notebooks; SmolLM2
VENV_CPU, VENV_CUDA = 3 * GIB, 8 * GIB


def cores(learners: int, number: float) -> Finding:
    """`number`: cores that this box may use, a part of one counts."""
    each = number / learners
    found = f"{number:g} for {learners}: {each:.2g} per learner"
    if each < 0.5:
        means = "When all run a cell with ranks at once, runs end at their timeouts."
        mend = f"Take a box with {learners} cores or more, or let learners work in groups of {max(2, round(1 / each))}."
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
        means = f"Saving will fail, even with one .venv for all: runs/ take {RUNS / GIB:g} GiB per learner."
        return Finding(PROBLEM, "class: disk", found, means, "Free some space, or take another disk.")
    if free < learners * own:
        means = f"Not enough for copies with a .venv and a cache each ({own / GIB:.1f} GiB per learner)."
        mend = (
            "Set up one copy of the course; learners get lessons/, labs/ and solutions/ of their own, and open them "
            "with its .venv/bin/jupyter lab, all with BEYOND_ONE_GPU_CACHE=/srv/class/cache"
        )
        return Finding(NOTE, "class: disk", found, means, mend)
    return Finding(OK, "class: disk", found)


def gpus(learners: int, number: int, leases: str) -> Finding:
    """`number`: GPUs of this box; `leases`: the folder through which they are lent, empty where there is none."""
    if not number:
        return Finding(OK, "class: GPUs", "none: all runs are on CPU ranks, and nobody waits")
    found = f"{number} for {learners}: in turns of one, everybody has had a GPU after {-(-learners // number)} runs"
    init = f"beyond class gpus init {leases or '/var/tmp/gpus'} --gpus {number}"
    if leases and not os.access(leases, os.W_OK | os.X_OK):
        return Finding(PROBLEM, "class: GPUs", f"{leases} cannot be written", "No run gets its turn.", init)
    if not leases and number < 2 * learners:
        return Finding(NOTE, "class: GPUs", found, "They are not lent, so all runs crowd onto the first ones.", init)
    return Finding(OK, "class: GPUs", found)


def for_a_class(learners: int) -> Iterator[Finding]:
    """What `learners` at once find on this box, beside what one does."""
    listed = len(re.findall(r"^GPU \d+:", driver() or "", re.MULTILINE))
    number_of_gpus = count_gpus() if os.environ.get(COUNT_VARIABLE) else listed
    yield cores(learners, cores_here())
    yield memory(learners, memory_here())
    yield disk(learners, shutil.disk_usage(ROOT).free, cuda=driver() is not None)
    yield gpus(learners, number_of_gpus, os.environ.get(FOLDER_VARIABLE, ""))


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Examine, and print what was found as it is found. Returns 1 if there is a problem, 2 for bad input."""
    parser = ArgumentParser(prog="beyond class preflight", description="Whether this box carries a class.")
    parser.add_argument("--learners", type=int, default=16, metavar="N", help="how many work on this box at once (16)")
    learners = parser.parse_args(argv).learners
    if learners < 1:
        raise ValueError("--learners must be above 0")
    findings = itertools.chain(examine(), for_a_class(learners))
    return report(findings, as_json=False, good=f"this box carries {learners} learners")
