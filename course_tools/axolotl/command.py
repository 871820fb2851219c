"""``beyond check run.yml --gpus 4x24GiB``: an Axolotl YAML, read before it costs a GPU-hour."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from course_tools.axolotl.check import Report, check
from course_tools.command_line import PROBLEM_FOUND, SUCCESS, ArgumentParser, print_json, reports_errors


def parser() -> ArgumentParser:
    """The options of the command."""
    one = ArgumentParser(
        prog="beyond check",
        description="Read an Axolotl YAML: what it amounts to, and every mistake in it.",
    )
    one.add_argument("config", metavar="RUN.yml", help="the YAML; its paths count from the working directory")
    one.add_argument("--gpus", default="4x24GiB", metavar="N x CARD", help="4x24GiB, 8xa100-80gb, 2x8xh100, 2xcpu")
    one.add_argument("--quick", action="store_true", help="do not ask Axolotl's own validator, which takes ten seconds")
    one.add_argument("--json", action="store_true", help="everything as JSON, sizes in bytes")
    return one


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Check one YAML. Returns 0; 1 if it holds mistakes; 2 after one sentence on stderr when it cannot be read."""
    given = parser().parse_args(argv)
    report = check(given.config, gpus=given.gpus, validate=not given.quick)
    print_json(report.as_dict()) if given.json else print(_coloured(report))
    return PROBLEM_FOUND if report.errors else SUCCESS


def _coloured(report: Report) -> str:
    """The report, its levels in colour on a terminal."""
    text = str(report)
    if not sys.stdout.isatty():
        return text
    colours = {"error": "31", "warning": "33", "note": "36"}
    lines = []
    for line in text.splitlines():
        level = line.split(" ", 1)[0]
        lines.append(f"\033[{colours[level]}m{line[:8]}\033[0m{line[8:]}" if level in colours else line)
    return "\n".join(lines)
