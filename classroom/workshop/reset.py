"""``beyond class reset``: labs back to their start, the work in them kept in labs/kept/<date-time>/.

At no moment is a lab's work only half there: a copy of it is on the disk before the fresh lab takes its place.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from classroom.authoring.labs import render
from course_lib.files import write_atomically
from course_lib.notebook import progress
from course_lib.notebook.contents import ROOT
from course_lib.notebook.progress import Progress, Store
from course_tools.command_line import ArgumentParser, reports_errors


def chosen(words: Sequence[str], root: Path = ROOT) -> list[str]:
    """Names of the labs meant by '5', '05' or '05_deepspeed_zero'; all of them for no words.

    Raises ValueError for a lab that does not exist, and where solutions/, from which labs are made, is not there.
    """
    known = sorted(path.stem for path in (root / "solutions").glob("*.ipynb"))
    if not known:
        raise ValueError(
            f"{root / 'solutions'} is not there, and labs are made from it: run this in a whole copy of the course"
        )
    found = []
    for word in words or known:
        number = f"{int(word):02}_" if re.fullmatch(r"[0-9]{1,2}", word) else None
        match = [name for name in known if name == word.removesuffix(".ipynb") or (number and name.startswith(number))]
        if not match:
            raise ValueError(f"there is no lab {word!r}; there are {', '.join(known)}")
        found += match
    return sorted(set(found))


def reset_labs(names: Sequence[str], root: Path = ROOT, *, dry_run: bool = False) -> tuple[list[str], Path | None]:
    """Bring these labs back to their start; returns those that changed and the folder in which their work is kept.

    A lab that is at its start already is left alone. The folder is None where there was no work to keep.

    Raises:
        OSError: something could not be written; every lab is then either as it was, or new with its work kept.
        ValueError: a lab's solution cannot become a lab, or something that is no file lies in its place.
    """
    labs = {name: root / "labs" / f"{name}.ipynb" for name in names}
    fresh = {name: render(root / "solutions" / f"{name}.ipynb").encode() for name in names}
    for lab in labs.values():
        if lab.is_symlink() or (lab.exists() and not lab.is_file()):
            raise ValueError(f"{lab} is a link or no file: move it away yourself, then reset again")
    changed = [name for name in names if not labs[name].exists() or labs[name].read_bytes() != fresh[name]]
    work = [name for name in changed if labs[name].exists()]
    kept = root / "labs" / "kept" / datetime.now().strftime("%Y-%m-%dT%H-%M-%S.%f") if work else None
    if dry_run or not changed:
        return changed, kept
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


def reset_progress(names: Sequence[str] | None = None) -> Path | None:
    """Forget what was recorded of these labs, of everything for None; returns the copy of what was there before.

    The copy lies beside the progress file, readable by its learner alone. None where nothing was recorded. Raises
    OSError when the copy, or then the file, cannot be written: what was recorded is there as before.
    """
    path = progress.progress_path()
    copy = path.with_name(f"progress.kept-{datetime.now().strftime('%Y%m%dT%H%M%S.%f')}.json")

    def forget(now: Progress) -> None:
        gone = [
            (records, name)
            for records in (now.labs, now.guesses)
            for name in records
            if names is None or name[:2] in {lab[:2] for lab in names}
        ]
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
    parser.add_argument("--lab", nargs="+", action="extend", default=[], metavar="05", help="these; all without it")
    parser.add_argument("--progress", action="store_true", help="forget what was passed in them, too (a copy is kept)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that holds solutions/ and labs/")
    options = parser.parse_args(argv)
    names = chosen(options.lab, options.root)
    would_be, be = ("would be ", "would be") if options.dry_run else ("", "is")
    try:
        changed, kept = reset_labs(names, options.root, dry_run=options.dry_run)
        for name in names:
            print(f"labs/{name}.ipynb: {f'{would_be}back to its start' if name in changed else 'at its start already'}")
        if kept:
            print(f"The work in them {be} kept in {kept}.")
            print("JupyterLab still shows the old ones: close them there without saving, then open them again.")
        if options.progress and options.dry_run:
            which = "these labs" if options.lab else "everything"
            print(f"What was recorded of {which} would be forgotten, a copy kept.")
        elif options.progress:
            copy = reset_progress(names if options.lab else None)
            print(f"Progress forgotten; as it was before: {copy}" if copy else "No progress was recorded of them.")
    except OSError as error:
        message = f"Not everything could be written ({error}); nothing is lost: mend that, then reset again."
        print(message, file=sys.stderr)
        return 1
    return 0
