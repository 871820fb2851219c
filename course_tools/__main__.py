"""The command `beyond`, also as ``python -m course_tools``: programs for real work, each in a module of its own."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# Name -> (module with a main(argv), help). A module is imported only when its command runs.
COMMANDS = {
    "memory": ("course_tools.planning.memory_command", "will it fit? GPU memory of a training step"),
    "plan": ("course_tools.planning.plan_command", "what to run on these GPUs: --model llama-3.1-8b --gpus 2x24GiB"),
    "check": ("course_tools.axolotl.command", "read an Axolotl YAML before it costs money: run.yml --gpus 4x24GiB"),
    "cluster": ("course_tools.clusters.command", "launch files for torchrun, Slurm, Kubernetes, Azure ML, SkyPilot"),
    "convert": ("course_tools.conversion.command", "split, merge and seal checkpoints of TP and PP ranks"),
    "watch": ("course_tools.monitoring.command", "say which rank of a training stopped, how, and where"),
    "doctor": (
        "course_tools.doctor.command",
        "what this machine can do for the course, and how to mend what it cannot",
    ),
    "proof": ("course_tools.doctor.proof", "ten seconds: a real 2-rank DDP training, held against one rank"),
    "progress": ("course_lib.notebook.where_you_stand", "which exercises you have passed, and what comes next"),
    "class": ("classroom.workshop.command", "a class on one box: preflight, gpus, board, reset, pace, notes, slides"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a problem that was found, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="beyond", description="Beyond One GPU: training that outgrows one GPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, words) in COMMANDS.items():
        commands.add_parser(name, help=words, add_help=False)
    given = sys.argv[1:] if argv is None else list(argv)
    name = parser.parse_known_args(given[:1])[0].command
    try:
        code = importlib.import_module(COMMANDS[name][0]).main(given[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader went away: beyond … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
