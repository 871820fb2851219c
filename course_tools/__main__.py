"""The command `beyond`, also as ``python -m course_tools``: programs for real work, each in a module of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from course_tools.command_line import reports_errors, run_command

# Name -> (module with a main(argv), help). A module is imported only when its command runs.
COMMANDS = {
    "memory": ("course_tools.planning.memory_command", "will it fit? GPU memory of a training step"),
    "plan": ("course_tools.planning.plan_command", "what to run on these GPUs: --model llama-3.1-8b --gpus 2x24GiB"),
    "check": ("course_tools.axolotl.command", "check an Axolotl YAML before it costs money: run.yml --gpus 4x24GiB"),
    "cluster": ("course_tools.clusters.command", "launch files for torchrun, Slurm, Kubernetes, Azure ML, SkyPilot"),
    "convert": ("course_tools.conversion.command", "split and merge checkpoints of TP and PP ranks, also Megatron's"),
    "watch": ("course_tools.monitoring.command", "say which rank of a training run stopped, how, and where"),
    "doctor": ("course_tools.doctor.command", "what this machine can run of the course, and how to fix the rest"),
    "proof": ("course_tools.doctor.proof", "ten seconds: train with DDP on two ranks and compare with one rank"),
    "progress": ("course_tools.progress", "which exercises you have passed, and what comes next"),
    "class": ("classroom.workshop.command", "a class on one box: preflight, gpus, board, reset, pace, hand-in, slides"),
}


@reports_errors
def _run(argv: Sequence[str]) -> int:
    return run_command(COMMANDS, argv, prog="beyond", description="Beyond One GPU: training that outgrows one GPU.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a problem that was found, 2 for bad input."""
    try:
        try:
            return _run(argv)
        finally:  # also after --help, which ends by SystemExit
            sys.stdout.flush()
    except BrokenPipeError:  # the reader went away: beyond … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports for SIGPIPE
    except KeyboardInterrupt:
        return 130  # what a shell reports for SIGINT


if __name__ == "__main__":
    sys.exit(main())
