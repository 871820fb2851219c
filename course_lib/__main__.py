"""``python -m course_lib``: what the course can do from a shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Commands with an argument parser of their own, in a module that is imported for them alone: (module, help).
DELEGATED = {
    "doctor": ("course_lib.doctor.command", "what this machine can do for the course, and how to mend what it cannot"),
    "workshop": (
        "course_lib.workshop.command",
        "a class on one box: preflight, gpus, board, reset, pace, notes, slides",
    ),
    "memory": ("course_lib.memory_command", "GPU memory of a training step; memory --help lists the settings"),
    "plan": ("course_lib.plan_command", "plan --model llama-3.1-8b --gpus 2x24GiB: what to run on these GPUs"),
    "axolotl": (
        "course_lib.axolotl_command",
        "axolotl check run.yml --gpus 4x24GiB: what a YAML amounts to, and its mistakes",
    ),
    "cluster": (
        "course_lib.clusters.command",
        "cluster write: launch files for torchrun, Slurm, Kubernetes, Azure ML, SkyPilot",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m course_lib", description="Beyond One GPU")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("proof", help="ten seconds: a real 2-rank DDP training, held against one rank")
    commands.add_parser("progress", help="what you have passed so far")
    for name, (_, words) in DELEGATED.items():
        commands.add_parser(name, help=words, add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command in DELEGATED:
        return importlib.import_module(DELEGATED[arguments.command][0]).main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "proof":
        from course_lib.proof import prove

        return 0 if prove() else 1
    return _progress()


def _progress() -> int:
    from course_lib import progress, where_you_stand

    done = progress.load()
    for row in where_you_stand.rows(done):
        off = f", off by {row['off by (median)']}" if row["off by (median)"] else ""
        kept = f"; {row['predictions measured']} predictions measured{off}" if row["predictions measured"] else ""
        print(f"{row['lesson']}: {row['exercises passed']} exercises passed{kept}")
    print(where_you_stand.next_step(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
