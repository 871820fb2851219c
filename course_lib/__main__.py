"""``python -m course_lib``: what the course can do from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m course_lib", description="Beyond One GPU")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("proof", help="ten seconds: a real 2-rank DDP training, held against one rank")
    commands.add_parser("progress", help="what you have passed so far")
    arguments = parser.parse_args(argv)
    if arguments.command == "proof":
        from course_lib.proof import prove

        return 0 if prove() else 1
    return _progress()


def _progress() -> int:
    from course_lib import progress

    done = progress.load()
    for lab, exercises in sorted(done.labs.items()):
        passed = sum(record.status == "passed" for record in exercises.values())
        print(f"{lab}: {passed} passed, {len(exercises) - passed} tried")
    if not done.labs:
        print("Nothing tried yet: open lessons/00_start_here.ipynb.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
