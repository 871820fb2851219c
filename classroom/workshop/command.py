"""``beyond class``: before the class, during it, and after a lab that went wrong."""

from __future__ import annotations

from collections.abc import Sequence

from course_tools.command_line import reports_errors, run_command

# Each in a module of its own, imported for it alone: name -> (module, help).
COMMANDS = {
    "preflight": ("classroom.workshop.preflight", "preflight --learners 16: whether this box carries the class"),
    "gpus": ("classroom.workshop.gpus", "who has which GPU, and who waits; gpus init lends them"),
    "slides": ("classroom.authoring.slides", "slides 5: a lesson's slides"),
    "pace": ("classroom.workshop.pace", "pace 5 --minutes 45, pace --track one-day: clock times, and what to skip"),
    "board": ("classroom.workshop.board", "board FOLDER: the class's progress as a page"),
    "reset": ("classroom.workshop.reset", "reset --lab 5: a lab back to its start, the work in it kept aside"),
    "hand-in": ("classroom.workshop.hand_in", "hand-in 5, for learners: what you passed, to paste into an issue"),
}


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Run one command of the class; returns its exit code: 0, 1 for a problem that was found, 2 for bad input."""
    epilog = "A day with them: site/instructors/index.md. Each takes --help."
    return run_command(COMMANDS, argv, prog="beyond class", description="A class on one box.", epilog=epilog)
