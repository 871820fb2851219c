"""``beyond class hand-in 5``, for learners: what they passed in a lab, as a block to paste into an issue."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.notebook import contents, progress
from course_lib.notebook.progress import Progress
from course_tools.command_line import ArgumentParser, reports_errors


def block(row: contents.MapRow, done: Progress) -> str:
    """The lab's part of `done` as Markdown, as the board reads it. Raises ValueError where nothing was tried."""
    records = done.labs.get(row.name)
    if not records:
        raise ValueError(f"Nothing of lab {row.number} is recorded: run its checks first, in labs/{row.name}.ipynb.")
    passed = sum(record.status == "passed" for record in records.values())
    tries = sum(record.tries for record in records.values())
    head = f"**Lab {row.number}, {row.title}**: {passed} of {len(row.exercises)} passed, {tries} tries"
    part = Progress({row.name: records}).to_json().replace("`", "\\u0060")  # nothing in it ends the block
    return f"{head}\n\n```json\n{part}```"


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the block. Returns 0, or 2 where there is nothing to hand in."""
    parser = ArgumentParser(
        prog="beyond class hand-in", description="What you passed in a lab, to paste into an issue."
    )
    parser.add_argument("lab", type=int, help="1 to 8")
    number = parser.parse_args(argv).lab
    contents.find(number, "labs")
    print(block(contents.map_rows()[number - 1], progress.load()))
    return 0
