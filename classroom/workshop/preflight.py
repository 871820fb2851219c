"""``beyond class preflight --learners 16``: whether this box carries a class.

What the doctor finds for one learner comes first, then what many at once add: cores, memory, disk, processes, GPUs.
"""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
from collections.abc import Iterator, Sequence

from classroom.workshop import class_needs
from course_lib.launch.leases import COUNT_VARIABLE, FOLDER_VARIABLE, count_gpus
from course_lib.notebook.contents import ROOT
from course_tools.command_line import ArgumentParser, reports_errors
from course_tools.doctor import examine
from course_tools.doctor.command import report
from course_tools.doctor.findings import Finding
from course_tools.doctor.gpus import driver
from course_tools.doctor.limits import cores_here, memory_here, tasks_here


def for_a_class(learners: int) -> Iterator[Finding]:
    """What `learners` at once find on this box, beside what one does."""
    cores, gpus = cores_here(), gpus_here()
    account = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    yield class_needs.cores(learners, cores)
    yield class_needs.memory(learners, memory_here())
    yield class_needs.disk(learners, shutil.disk_usage(ROOT).free, cuda=driver() is not None)
    yield class_needs.shared_memory(learners, class_needs.size_of_shared_memory(), gpus)
    yield class_needs.processes(learners, None if account == resource.RLIM_INFINITY else account, tasks_here(), cores)
    yield class_needs.gpus(learners, gpus, os.environ.get(FOLDER_VARIABLE, ""))


def gpus_here() -> int:
    """GPUs to lend; 0 where the driver lists none. Raises ValueError where the variable that says how many is no number."""
    listed = len(re.findall(r"^GPU \d+:", driver() or "", re.MULTILINE))
    return count_gpus() if os.environ.get(COUNT_VARIABLE) else listed


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Examine, and print what was found as it is found. Returns 1 if there is a problem, 2 for bad input."""
    parser = ArgumentParser(
        prog="beyond class preflight", description="Whether this box carries a class, in half a minute."
    )
    parser.add_argument("--learners", type=int, default=16, metavar="N", help="how many work on this box at once (16)")
    parser.add_argument("--class-only", action="store_true", help="without what the doctor finds for one learner")
    parser.add_argument("--json", action="store_true", help="all findings as one JSON list")
    options = parser.parse_args(argv)
    if not 1 <= options.learners <= 1000:
        raise ValueError("--learners takes 1 to 1000.")
    gpus_here()
    findings = itertools.chain(() if options.class_only else examine(), for_a_class(options.learners))
    return report(findings, as_json=options.json, good=f"this box carries {options.learners} learners")
