"""Sum up runs of pytest, give each failure a second chance, and end with ``N passed, N failed, N skipped``.

    python tests/summary.py summary.txt report.xml 1

Each run is named by its report (``pytest --junitxml=FILE -o junit_family=xunit1``) and its exit code. What failed runs
once more, alone: a test by its name, a notebook as a whole. What passes then counts as passed and is listed as "passed
alone", with what it said first. The exit code is 1 if something failed twice, if more than LIMIT passed only alone, or
if a run ended without a report or failed without naming a test. The summary is printed and written to summary.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

MESSAGE_LENGTH = 150
LIMIT = 3  # tests and notebooks that may pass only alone; more of them mean that the suite is unsound
MANY = 10  # tests and notebooks beyond which nothing runs again: something is broken, and each of them takes its time


@dataclass
class Report:
    """What one run of pytest says."""

    seconds: float = 0.0  # from its start to its end
    work: dict[str, float] = field(default_factory=lambda: {"tests": 0.0, "notebooks": 0.0})  # seconds, workers summed
    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # name -> the first line of why
    target: dict[str, str] = field(default_factory=dict)  # name of a failure -> what pytest takes to run it again


def read(path: Path, exit_code: int) -> Report:
    """Read one run's report; a run without one has failed, and nothing of it can run again."""
    report = Report()
    try:
        root = ElementTree.parse(path)
    except (OSError, ElementTree.ParseError):
        report.failed[str(path)] = f"pytest ended with exit code {exit_code} and left no report"
        return report
    report.seconds = sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
    seen: set[str] = set()
    for case in root.iter("testcase"):
        name, file = _name(case), case.get("file", "")
        seen.add(name)
        report.work["notebooks" if file.endswith(".ipynb") else "tests"] += float(case.get("time", 0))
        for outcome in case:
            if outcome.tag in ("failure", "error"):
                report.failed.setdefault(name, _reason(outcome))
                whole_file = file.endswith(".ipynb") or outcome.get("message") == "collection failure"
                report.target.setdefault(name, file if whole_file else name)
            elif outcome.tag == "skipped":
                report.skipped.add(name)
    report.skipped -= set(report.failed)
    report.passed = seen - report.skipped - set(report.failed)
    if exit_code and not report.failed:
        report.failed[str(path)] = f"pytest ended with exit code {exit_code} and named no test"
    return report


def _name(case: ElementTree.Element) -> str:
    """``tests/test_x.py::TestClass::test_y``, as pytest takes it.

    The report's own file is the one where a function stands: for a test that a class inherits, not the one to run.
    """
    file, name, words = case.get("file", ""), case.get("name", ""), case.get("classname", "").split(".")
    if file.endswith(".ipynb"):
        return f"{file}::{name}"
    for end in range(len(words), 0, -1):
        if Path(module := "/".join(words[:end]) + ".py").is_file():
            return "::".join([module, *words[end:], name])
    return f"{file}::{name}"


def _reason(outcome: ElementTree.Element) -> str:
    """One line: what was raised. nbval tells it last and in colours, and so does a module that cannot be imported."""
    message, text = outcome.get("message") or "", re.sub(r"(#x1B|\x1b)\[[\d;]*m", "", outcome.text or "")
    if message == "collection failure" or "Notebook cell execution failed" in message:
        message = text.strip().splitlines()[-1].removeprefix("E ")
    return message.strip().split("\n")[0][:MESSAGE_LENGTH]


def passes_alone(target: str, folder: Path) -> bool:
    """Run a test or a notebook by itself; show the end of what pytest says when it fails again."""
    print(f"Once more, alone: {target}", flush=True)
    report, log = folder / "alone.xml", folder / "alone.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1", target]
    with open(log, "wb") as output:  # no pipe: a process that a test leaves behind would hold it open
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
    passed = done.returncode == 0 and bool(read(report, 0).passed)
    if not passed:
        print(log.read_text(encoding="utf-8", errors="replace")[-4000:], flush=True)
    return passed


def main(summary: str, *runs: str) -> int:
    """Print and write the summary of all runs; see the module."""
    reports = {path: read(Path(path), int(code)) for path, code in zip(runs[::2], runs[1::2], strict=True)}
    failed, target = {}, {}
    for report in reports.values():
        failed, target = failed | report.failed, target | report.target

    began, alone = time.monotonic(), {}  # target -> why it failed first
    targets = list(dict.fromkeys(target.values()))
    for again in targets if len(targets) <= MANY else ():
        if len(alone) <= LIMIT and passes_alone(again, Path(summary).parent):
            alone[again] = next(failed[name] for name in failed if target.get(name) == again)
    failed_twice = {name: why for name, why in failed.items() if target.get(name) not in alone}

    work = {kind: sum(report.work[kind] for report in reports.values()) for kind in ("tests", "notebooks")}
    seconds = sum(report.seconds for report in reports.values())
    chances = f"second chances {(time.monotonic() - began) / 60:.1f}"
    spent = ", ".join(f"{kind} {seconds_of_kind / 60:.1f}" for kind, seconds_of_kind in work.items())
    lines = [f"Minutes: {seconds / 60:.1f} (the workers' sums: {spent}), {chances}"]
    lines += [f"passed alone: {name}, first: {why}" for name, why in alone.items()]
    lines += [f"FAILED {name}: {why}" for name, why in failed_twice.items()]
    if len(alone) > LIMIT:
        lines.append(f"FAILED: more than {LIMIT} passed only alone; look for what they share.")
    passed = sum(len(report.passed) for report in reports.values()) + len(failed) - len(failed_twice)
    skipped = sum(len(report.skipped) for report in reports.values())
    lines.append(f"{passed} passed, {len(failed_twice)} failed, {skipped} skipped")
    Path(summary).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, sep="\n")
    return 1 if failed_twice or len(alone) > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
