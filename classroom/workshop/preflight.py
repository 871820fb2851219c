"""``beyond class preflight --learners 16``: whether this box carries a class.

What the doctor finds for one learner comes first, then what many at once add: cores, memory, disk, limits, GPUs, ports.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence

from classroom.workshop import class_needs
from course_lib.launch.leases import COUNT_VARIABLE, FOLDER_VARIABLE, count_gpus
from course_lib.notebook.contents import ROOT
from course_tools.doctor import examine
from course_tools.doctor.command import report
from course_tools.doctor.findings import Finding
from course_tools.doctor.gpus import driver
from course_tools.doctor.granted import cores_here, memory_here, tasks_here


def for_a_class(learners: int) -> Iterator[Finding]:
    """What `learners` at once find on this box, beside what one does."""
    number = cores_here()
    gpus = gpus_here()
    yield class_needs.cores(learners, number)
    yield class_needs.memory(learners, memory_here())
    yield class_needs.disk(learners, shutil.disk_usage(ROOT).free, cuda=driver() is not None)
    yield class_needs.shared_memory(learners, class_needs.free_shared_memory(), gpus)
    yield class_needs.open_files(_limit(resource.RLIMIT_NOFILE))
    yield class_needs.processes(learners, _limit(resource.RLIMIT_NPROC), tasks_here(), number)
    yield class_needs.gpus(learners, gpus, os.environ.get(FOLDER_VARIABLE, ""))
    yield class_needs.ports(learners, class_needs.busy_ports(learners))


def gpus_here() -> int:
    """GPUs to lend; 0 where the driver lists none. Raises ValueError where the variable that says how many is no number."""
    listed = len(re.findall(r"^GPU \d+:", driver() or "", re.MULTILINE))
    return count_gpus() if os.environ.get(COUNT_VARIABLE) else listed


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, and print what was found as it is found. Returns 1 if there is a problem, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="beyond class preflight",
        description="Whether this box carries a class, in half a minute.",
    )
    parser.add_argument("--learners", type=int, default=16, metavar="N", help="how many work on this box at once (16)")
    parser.add_argument("--class-only", action="store_true", help="without what the doctor finds for one learner")
    parser.add_argument("--json", action="store_true", help="all findings as one JSON list")
    given = parser.parse_args(argv)
    if not 1 <= given.learners <= 1000:
        parser.error("--learners takes 1 to 1000")
    try:
        gpus_here()
    except ValueError as error:
        parser.error(str(error))
    one_learner = () if given.class_only else examine()
    findings = itertools.chain(one_learner, for_a_class(given.learners))
    return report(findings, as_json=given.json, good=f"this box carries {given.learners} learners")


if __name__ == "__main__":
    sys.exit(main())
