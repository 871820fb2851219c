"""``beyond progress``: one line per lesson, and the next exercise."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.notebook import progress
from course_lib.notebook.where_you_stand import how_guesses_went, next_step, standings
from course_tools.command_line import ArgumentParser, reports_errors


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print which exercises are passed, how guesses went, and what comes next. Returns 0."""
    ArgumentParser(prog="beyond progress", description="Which exercises you have passed.").parse_args(argv)
    done = progress.load()
    for standing in standings(done):
        row, guesses = standing.lesson, f"; guesses: {standing.guesses}" if standing.guesses else ""
        print(f"{row.name}: {standing.passed} of {len(row.exercises)} exercises passed{guesses}")
    print(how_guesses_went(done))
    print(next_step(done))
    return 0
