"""``beyond check run.yml --gpus 4x24GiB``: an Axolotl YAML, read before it costs a GPU-hour."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from course_tools.axolotl.check import Report, check

GOOD, MISTAKES, BAD_INPUT = 0, 1, 2  # exit codes


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the page of usage that argparse puts before it."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message[:1].upper()}{message[1:]} (--help lists the options).")


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    one = _Parser(
        prog="beyond check",
        description="Read an Axolotl YAML: what it amounts to, and every mistake in it.",
        allow_abbrev=False,
    )
    one.add_argument("config", metavar="RUN.yml", help="the YAML; its paths count from the working directory")
    one.add_argument("--gpus", default="4x24GiB", metavar="N x CARD", help="4x24GiB, 8xa100-80gb, 2x8xh100, 2xcpu")
    one.add_argument("--deep", action="store_true", help="ask Axolotl's own validators, too (ten seconds)")
    one.add_argument("--json", action="store_true", help="everything as JSON, sizes in bytes")
    return one


def main(argv: Sequence[str]) -> int:
    """Check one YAML. Returns 0; 1 if it holds mistakes; 2 after one sentence on stderr when it cannot be read."""
    try:
        given = parser().parse_args(argv)
        report = check(given.config, gpus=given.gpus, deep=given.deep)
    except ValueError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(report.as_dict(), indent=2, default=str) if given.json else _coloured(report))
    return MISTAKES if report.errors else GOOD


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
