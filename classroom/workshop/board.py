"""``beyond class board FOLDER --out board.html``: the class's progress as a page, written again every few seconds.

FOLDER holds a folder for each learner with progress.json in it: start each learner's JupyterLab with
BEYOND_ONE_GPU_HOME=FOLDER/ada. Only its owner may read a progress file (mode 0600): run the board as root, or copy the
files together with their times (rsync -t). In place of FOLDER, a file with what a class handed in by issue:
gh issue list --label hand-in --state all --limit 1000 --json author,body > issues.json
The page is one file without scripts: open it in a browser; to show it on other machines, serve its folder.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from classroom.workshop import learners
from course_lib.files import write_atomically
from course_lib.notebook import contents
from course_tools.command_line import ArgumentParser, reports_errors

TEMPLATE = Path(__file__).with_name("board.html.j2")
STUCK_SHOWN = 2  # exercises per learner
EVERY = 5  # seconds between two looks


def render(given: Path, every: int | None = None) -> str:
    """Return the page of `learners.read_class`, which a browser loads again `every` so many seconds.

    Jinja escapes every value: nothing in a progress file or a name becomes markup.
    """
    import jinja2

    labs = contents.labs()
    found = learners.read_class(given, labs)
    counted = [learner.counts for learner in found if not learner.problem]
    page = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        learners=found,
        labs=list(labs),
        medians=[statistics.median(passed for passed, _, _ in column) for column in zip(*counted, strict=True)],
        stuck_shown=STUCK_SHOWN,
        every=every,
        now=datetime.now().strftime("%d %b %Y %H:%M:%S"),
    )


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Write the page until Ctrl-C, or once. Returns 2 for a folder or a file that cannot be used."""
    parser = ArgumentParser(
        prog="beyond class board", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("given", type=Path, metavar="FOLDER", help="one folder for each learner, or a file of issues")
    parser.add_argument("--out", type=Path, default=Path("board.html"), metavar="OUT.html", help="default: board.html")
    parser.add_argument("--once", action="store_true", help="write the page once and end")
    options = parser.parse_args(argv)
    if options.out.resolve().is_relative_to(options.given.resolve()):
        raise ValueError(f"{options.out} lies in what is only read: give --out a place outside {options.given}.")
    every = None if options.once else EVERY
    write_atomically(options.out, render(options.given, every))
    print(
        f"Written: {options.out.resolve()}" + (f", again every {every} s (Ctrl-C ends it)" if every else ""), flush=True
    )
    try:
        while every:
            time.sleep(every)
            write_atomically(options.out, render(options.given, every))
    except KeyboardInterrupt:
        print()
    return 0
