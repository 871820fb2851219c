"""``beyond class reset``: labs back to their start, the work in them kept in labs/kept/<date-time>/.

At no moment is a lab's work only half there: a copy of it is on the disk before the fresh lab takes its place.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from classroom.authoring.labs import render
from course_lib.files import write_atomically
from course_lib.notebook import contents, progress
from course_lib.notebook.contents import ROOT
from course_lib.notebook.progress import Progress, Store
from course_tools.command_line import ArgumentParser, reports_errors


def reset_labs(names: Sequence[str], root: Path) -> tuple[list[str], Path | None]:
    """Bring these labs back to their start; returns those that changed and the folder in which their work is kept.

    A lab that is at its start already is left alone. The folder is None where there was no work to keep. After an
    OSError every lab is either as it was, or new with its work kept. Raises ValueError for a lab that is no file.
    """
    labs = {name: root / "labs" / f"{name}.ipynb" for name in names}
    fresh = {name: render(root / "solutions" / f"{name}.ipynb").encode() for name in names}
    for lab in labs.values():
        if lab.is_symlink() or (lab.exists() and not lab.is_file()):
            raise ValueError(f"{lab} is a link or no file: move it away yourself, then reset again")
    changed = [name for name in names if not labs[name].exists() or labs[name].read_bytes() != fresh[name]]
    work = [name for name in changed if labs[name].exists()]
    kept = root / "labs" / "kept" / datetime.now().strftime("%Y-%m-%dT%H-%M-%S.%f") if work else None
    (root / "labs").mkdir(exist_ok=True)
    if kept:
        kept.mkdir(parents=True)
        for name in work:
            write_atomically(kept / f"{name}.ipynb", labs[name].read_bytes(), durable=True)
            shutil.copystat(labs[name], kept / f"{name}.ipynb")
    for name in changed:
        write_atomically(labs[name], fresh[name], durable=True)
    return changed, kept


class _Strict(Store):
    """A store that fails where the file cannot be written, instead of going on in memory as for a notebook."""

    def _warn(self, error: OSError) -> None:
        raise error


def reset_progress(names: Sequence[str]) -> Path | None:
    """Forget what was recorded of these labs and their lessons; returns the copy of what was there before.

    The copy lies beside the progress file, readable by its learner alone. None where nothing was recorded. After an
    OSError what was recorded is there as before.
    """
    path = progress.progress_path()
    copy = path.with_name(f"progress.kept-{datetime.now().strftime('%Y%m%dT%H%M%S.%f')}.json")
    numbers = {name[:2] for name in names}

    def forget(now: Progress) -> None:
        gone = [(records, name) for records in (now.labs, now.guesses) for name in records if name[:2] in numbers]
        if gone:
            write_atomically(copy, now.to_json(), durable=True, mode=0o600)
        for records, name in gone:
            del records[name]

    if not path.exists():
        return None
    _Strict(path).update(forget)  # under the lock that notebooks take, too
    return copy if copy.exists() else None


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Reset, and say where the work lies. Returns 1 when something could not be written, 2 for bad input."""
    parser = ArgumentParser(
        prog="beyond class reset", description="Labs back to their start; the work in them is kept."
    )
    parser.add_argument("--lab", type=int, nargs="+", action="extend", metavar="5", help="these; all without it")
    parser.add_argument("--progress", action="store_true", help="forget what was passed in them, too (a copy is kept)")
    options = parser.parse_args(argv)
    solutions = [contents.find(number, "solutions", ROOT) for number in options.lab or ()]
    names = sorted(path.stem for path in solutions or (ROOT / "solutions").glob("0[1-9]_*.ipynb"))
    try:
        changed, kept = reset_labs(names, ROOT)
        for name in names:
            print(f"labs/{name}.ipynb: {'back to' if name in changed else 'already at'} its start")
        if kept:
            print(f"The work in them is kept in {kept}.")
            print("JupyterLab still shows the old ones: close them there without saving, then open them again.")
        if options.progress:
            copy = reset_progress(names)
            print(f"Progress forgotten; as it was before: {copy}" if copy else "No progress was recorded of them.")
    except OSError as error:
        print(
            f"Not everything could be written ({error}); nothing is lost: mend that, then reset again.", file=sys.stderr
        )
        return 1
    return 0
