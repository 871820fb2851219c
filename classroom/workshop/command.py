"""``beyond class``: before the class, during it, and after a lab that went wrong."""

from __future__ import annotations

from collections.abc import Sequence

from course_tools.command_line import reports_errors, run_command

# Each in a module of its own, imported for it alone: name -> (module, help).
COMMANDS = {
    "preflight": ("classroom.workshop.preflight", "preflight --learners 16: whether this box carries the class"),
    "gpus": ("classroom.workshop.gpus", "who has which GPU, and who waits; gpus init lends them"),
    "board": ("classroom.workshop.board", "board FOLDER: the class's progress as a page"),
    "reset": ("classroom.workshop.reset", "reset --lab 05: a lab back to its start, the work in it kept aside"),
    "pace": ("classroom.workshop.pace", "pace 5 --minutes 45: minutes of each section, and what to skip"),
    "notes": ("classroom.authoring.notes", "notes 5: the instructor's note on a lesson"),
    "slides": ("classroom.authoring.slides", "slides 5: a lesson's slides"),
}
DAY = """\
the evening before   preflight --learners 16
on a box with GPUs   gpus init /var/tmp/gpus, then gpus shows who has which, and who waits
before a lesson      notes 5; pace 5 --minutes 45 --start 09:30; slides 5
during the lab       board /srv/class, then open board.html (each learner's JupyterLab with BEYOND_ONE_GPU_HOME=/srv/class/NAME)
a lab gone wrong     reset --lab 05
"""


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Run one command of the class; returns its exit code: 0, 1 for a problem that was found, 2 for bad input."""
    epilog = f"A day with them:\n\n{DAY}\nEach takes --help."
    return run_command(COMMANDS, argv, prog="beyond class", description="A class on one box.", epilog=epilog)
