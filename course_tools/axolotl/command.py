"""``beyond check run.yml --gpus 4x24GiB``: Axolotl YAMLs, read before they cost a GPU-hour."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from course_tools.axolotl.check import check
from course_tools.command_line import BAD_INPUT, PROBLEM_FOUND, SUCCESS, ArgumentParser, print_json, reports_errors


def parser() -> ArgumentParser:
    """The options of the command."""
    one = ArgumentParser(
        prog="beyond check",
        description="Read Axolotl YAMLs: what each amounts to, and every mistake in it.",
    )
    one.add_argument(
        "configs", nargs="+", metavar="RUN.yml", help="YAMLs; their paths count from the working directory"
    )
    one.add_argument(
        "--gpus", default="4x24GiB", metavar="N x CARD", help="8xa100-80gb, 2x8xh100, 2xcpu; default 4x24GiB"
    )
    one.add_argument("--quick", action="store_true", help="do not ask Axolotl's own validator, which takes ten seconds")
    one.add_argument("--fix", metavar="NEW.yml", help="write the YAML with what is certain mended; comments stay")
    one.add_argument("--json", action="store_true", help="everything as JSON, sizes in bytes")
    return one


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Check YAMLs. Returns 0; 1 if one holds mistakes; 2 after one sentence on stderr when one cannot be read."""
    given = parser().parse_args(argv)
    if given.fix and len(given.configs) > 1:
        raise ValueError("--fix writes one file: give one YAML.")
    if given.fix and os.path.exists(given.fix):
        raise ValueError(f"{given.fix} is there already: name another file.")
    reports, unreadable = [], 0
    for config in given.configs:
        try:
            reports.append(check(config, gpus=given.gpus, validate=not given.quick))
        except ValueError as error:
            if not given.configs[1:]:
                raise
            print(error, file=sys.stderr)
            unreadable += 1
    if given.json:
        print_json([one.as_dict() for one in reports] if given.configs[1:] else reports[0].as_dict())
    else:
        print("\n\n".join(map(str, reports)))
        if not given.quick and sys.stdout.isatty():
            print(f"\nAxolotl's validator: {sum(one.validator_seconds for one in reports):.1f} s")
    if given.fix:
        mended = [one for one in reports[0].findings if one.mend]
        if mended:
            Path(given.fix).write_text(reports[0].mended(), encoding="utf-8")
        done = f"wrote {given.fix}, mended: {', '.join(dict.fromkeys(one.key for one in mended))}"
        print(done if mended else f"No mend is certain, so {given.fix} is not written.")
    found = PROBLEM_FOUND if any(one.errors for one in reports) else SUCCESS
    return BAD_INPUT if unreadable else found
