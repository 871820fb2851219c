"""``beyond doctor``: one line per finding; the exit code is 1 if something will not run."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from course_tools.command_line import ArgumentParser, print_json, reports_errors
from course_tools.doctor.examining import examine
from course_tools.doctor.findings import NOTE, OK, PROBLEM, Finding

MARKS = {OK: "ok     ", NOTE: "note   ", PROBLEM: "PROBLEM"}
WIDTH = 110


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Examine, and print what was found as it is found. Returns 1 if there is a problem, 0 otherwise."""
    parser = ArgumentParser(
        prog="beyond doctor", description="What this machine can do for the course, in under 15 seconds."
    )
    parser.add_argument("--json", action="store_true", help="all findings as one JSON list")
    given = parser.parse_args(argv)
    return report(examine(), as_json=given.json, good="every lesson runs here")


def report(findings: Iterable[Finding], *, as_json: bool, good: str) -> int:
    """Print the findings, each as it is found, and a last line, which says `good` where nothing is wrong.

    Returns:
        The exit code: 1 if there is a problem, 0 otherwise.
    """
    began, found = time.perf_counter(), []
    for finding in findings:
        found.append(finding)
        if not as_json:
            print(text_of(finding), flush=True)
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        print(summary(found, time.perf_counter() - began, good))
    return int(any(finding.level == PROBLEM for finding in found))


def text_of(finding: Finding) -> str:
    """Write a finding for a terminal, with what it means and how to fix it below it."""
    lines = [f"{MARKS[finding.level]}  {finding.about:<15} {finding.says}"]
    for words in (finding.means, finding.mend):
        lines += textwrap.wrap(words, WIDTH - 25, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * 25).join(lines)


def summary(found: Sequence[Finding], seconds: float, good: str) -> str:
    """Write the last line."""
    count = {level: sum(finding.level == level for finding in found) for level in MARKS}
    if count[PROBLEM]:
        end = f"{count[PROBLEM]} problem{'s' * (count[PROBLEM] > 1)}, with what mends {'them' if count[PROBLEM] > 1 else 'it'} above"
    else:
        end = good
    return f"{end} ({count[OK]} ok, {count[NOTE]} note{'s' * (count[NOTE] != 1)}, {seconds:.1f} s)"
