"""Sum up several runs of pytest: one line for each failure, then ``N passed, N failed, N skipped``.

    python tests/summary.py summary.txt library.xml 0 notebooks.xml 1

It is printed and written to summary.txt. Each run is named by its report (``pytest --junitxml=FILE -o
junit_family=xunit1``) and its exit code. The exit code of the summary is 1 if anything failed, also if a run ended
without a report or failed without naming a test.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MESSAGE_LENGTH = 150


def read(report: Path, exit_code: int) -> tuple[set[str], dict[str, str], set[str]]:
    """Return the tests of one run: passed, failed with the first line of why, skipped."""
    try:
        cases = ElementTree.parse(report).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return set(), {str(report): f"pytest ended with exit code {exit_code} and left no report"}, set()
    seen: set[str] = set()
    failed: dict[str, str] = {}
    skipped: set[str] = set()
    for case in cases:
        name = _name(case)
        seen.add(name)
        for outcome in case:
            if outcome.tag in ("failure", "error"):
                failed.setdefault(name, _reason(outcome))
            elif outcome.tag == "skipped":
                skipped.add(name)
    if exit_code and not failed:
        failed[str(report)] = f"pytest ended with exit code {exit_code} and named no test"
    return seen - skipped - set(failed), failed, skipped - set(failed)


def _name(case: ElementTree.Element) -> str:
    """``tests/test_x.py::TestClass::test_y``, as pytest takes it."""
    file, name = case.get("file", ""), case.get("name", "")
    module = file.removesuffix(".py").replace("/", ".")
    inside = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join(filter(None, (file, inside if file.endswith(".py") else "", name)))


def _reason(outcome: ElementTree.Element) -> str:
    """One line: what was raised. nbval tells it last and in colours, and so does a module that cannot be imported."""
    message, text = outcome.get("message") or "", re.sub(r"(#x1B|\x1b)\[[\d;]*m", "", outcome.text or "")
    if message == "collection failure" or "Notebook cell execution failed" in message:
        message = text.strip().splitlines()[-1].removeprefix("E ")
    return message.strip().split("\n")[0][:MESSAGE_LENGTH]


def main(summary: str, *runs: str) -> int:
    """Print and write the summary of all runs; see the module."""
    passed, skipped, failed = 0, 0, {}
    for report, exit_code in zip(runs[::2], runs[1::2], strict=True):
        run_passed, run_failed, run_skipped = read(Path(report), int(exit_code))
        passed, skipped, failed = passed + len(run_passed), skipped + len(run_skipped), failed | run_failed
    lines = [f"FAILED {name}: {reason}" for name, reason in failed.items()]
    lines.append(f"{passed} passed, {len(failed)} failed, {skipped} skipped")
    Path(summary).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
