"""``beyond class board FOLDER --out board.html``: the class's progress as a page, written again every few seconds.

FOLDER holds a folder for each learner with progress.json in it, or files such as ada.json; a pattern does, too:
``board '/home/*/.local/share/beyond-one-gpu/progress.json'``. To have them in one place, start each learner's JupyterLab
with BEYOND_ONE_GPU_HOME=/srv/class/ada. Only its owner may read a progress file (mode 0600): run the board as root, or
copy the files together with their times (rsync -t). Names are what the folders are called. The page is one file
without scripts that loads itself again: open it in a browser; to show it on other machines, serve its folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from classroom.workshop import learners
from course_lib.files import write_atomically
from course_lib.notebook import contents
from course_tools.command_line import ArgumentParser, reports_errors

TEMPLATE = Path(__file__).with_name("board.html.j2")
STUCK_SHOWN = 2  # exercises per learner


def render(given: str, order: str = "name", every: float | None = None) -> str:
    """Return the page as HTML. Jinja escapes every value: nothing in a progress file or a name becomes markup.

    Args:
        given: the class's folder or pattern, as `learners.find_files` takes it.
        order: one of `learners.ORDERS`.
        every: seconds after which a browser loads the page again; None for never.

    Raises:
        ValueError, OSError: as `learners.find_files`.
    """
    import jinja2

    labs = contents.labs()
    _, files = learners.find_files(given)
    found = sorted((learners.read(name, file, labs) for name, file in files), key=learners.ORDERS[order])
    page = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        rows=[_row(learner, labs) for learner in found],
        labs=list(labs),
        medians=learners.medians(found, labs),
        cut=learners.MOST_LEARNERS if len(found) == learners.MOST_LEARNERS else 0,
        every=every,
        now=datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
    )


def _row(learner: learners.Learner, labs: learners.Labs) -> dict:
    counts = [] if learner.problem else [(*learner.counts[lab], len(exercises)) for lab, exercises in labs.items()]
    if counts:
        counts.append(tuple(map(sum, zip(*counts, strict=True))))
    last_sign = learner.last_sign
    return {
        "learner": learner,
        "cells": [{"passed": passed, "tried": tried, "of": of} for passed, tried, of in counts],
        "stuck": learner.stuck[:STUCK_SHOWN],
        "more": max(0, len(learner.stuck) - STUCK_SHOWN),
        "when": None if last_sign is None else datetime.fromtimestamp(last_sign, UTC).isoformat(timespec="seconds"),
        "ago": "" if last_sign is None else ago(time.time() - last_sign),
    }


def ago(seconds: float) -> str:
    """How long ago, in the one unit that fits."""
    minutes = max(0, int(seconds // 60))
    if minutes < 1:
        return "just now"
    if minutes < 120:
        return f"{minutes} min ago"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // 1440} days ago"


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Write the page until Ctrl-C, or once. Returns 2 for a folder or a file that cannot be used."""
    parser = ArgumentParser(
        prog="beyond class board", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", help="one folder or file for each learner, or a pattern in quotes")
    parser.add_argument("--out", type=Path, default=Path("board.html"), metavar="OUT.html", help="default: board.html")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks (5)")
    parser.add_argument("--sort", choices=list(learners.ORDERS), default="name")
    parser.add_argument("--once", action="store_true", help="write the page once and end")
    options = parser.parse_args(argv)
    if not 1 <= options.every <= 3600:
        raise ValueError("--every takes 1 to 3600 seconds.")
    out = options.out.absolute()
    if out.resolve().is_relative_to(learners.find_files(options.folder)[0].resolve()):
        raise ValueError(f"{out} lies in the class's folder, which is only read: give --out a place outside it.")
    every = None if options.once else options.every
    write_atomically(out, render(options.folder, options.sort, every))
    print(f"Written: {out}" + (f", again every {every:g} s (Ctrl-C ends it)" if every else ""), flush=True)
    try:
        while every:
            time.sleep(every)
            write_atomically(out, render(options.folder, options.sort, every))
    except KeyboardInterrupt:
        print()
    return 0
