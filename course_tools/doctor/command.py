"""``beyond doctor``: a line for each finding; the exit code is 1 if something will not run."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from course_tools.command_line import PROBLEM_FOUND, SUCCESS, ArgumentParser, print_json, reports_errors
from course_tools.doctor.examining import examine
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding

MARKS = {OK: "ok", NOTE: "note", PROBLEM: "PROBLEM"}
INDENT, WIDTH = 25, 110


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Examine, and print what was found as it is found. Returns 1 if there is a problem, 0 otherwise."""
    parser = ArgumentParser(prog="beyond doctor", description="What this machine can do for the course, in 15 seconds.")
    parser.add_argument("--json", action="store_true", help="all findings as one JSON list")
    return report(examine(), as_json=parser.parse_args(argv).json, good="every lesson runs here")


def report(findings: Iterable[Finding], *, as_json: bool, good: str) -> int:
    """Print the findings, each as it is found, and a last line, which says `good` where nothing is wrong.

    Returns:
        The exit code: 1 if there is a problem, 0 otherwise.
    """
    began, found = time.perf_counter(), []
    for finding in findings:
        found.append(finding)
        if not as_json:
            print(f"{MARKS[finding.level]:<8} {finding.about:<15} {finding.says}", flush=True)
            for words in (finding.means, finding.mend):
                for line in textwrap.wrap(words, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False):
                    print(" " * INDENT + line, flush=True)
    ok, notes, problems = (sum(finding.level == level for finding in found) for level in MARKS)
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        says = f"{problems} PROBLEM{'S' * (problems > 1)}, with what to do above" if problems else good
        print(f"{says} ({ok} ok, {notes} note{'s' * (notes != 1)}, {time.perf_counter() - began:.1f} s)")
    return PROBLEM_FOUND if problems else SUCCESS
