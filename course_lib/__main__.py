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
    commands.add_parser(
        "memory", help="GPU memory of a training step; memory --help lists the settings", add_help=False
    )
    commands.add_parser(
        "axolotl", help="axolotl check run.yml --gpus 4x24GiB: what a YAML amounts to, and its mistakes", add_help=False
    )
    commands.add_parser(
        "cluster",
        help="cluster write: launch files for torchrun, Slurm, Kubernetes, Azure ML, SkyPilot",
        add_help=False,
    )
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "memory":
        from course_lib import memory_command

        return memory_command.main(rest)
    if arguments.command == "axolotl":
        from course_lib import axolotl_command

        return axolotl_command.main(rest)
    if arguments.command == "cluster":
        from course_lib.clusters import command

        return command.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
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
