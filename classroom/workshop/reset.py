"""``beyond class reset``: labs back to their start, the work in them kept in labs/kept/<date-time>/.

At no moment is a lab's work without a name: the new notebook is written beside the lab and is on the disk before
anything else happens; then the work gets its second name in labs/kept/, and only then takes the new one its place.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from classroom.authoring.labs import render
from course_lib.notebook import progress
from course_lib.notebook.contents import ROOT
from course_lib.notebook.progress import Progress, Store


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
    """Bring these labs back to their start; gives those that changed and the folder in which their work is kept.

    A lab that is at its start already is left alone. The folder is None where there was no work to keep.

    Raises:
        OSError: something could not be written; every lab is then either as it was, or new with its work kept.
        ValueError: a lab's solution cannot become a lab, or something that is no file lies in its place.
    """
    labs = root / "labs"
    fresh = {name: render(root / "solutions" / f"{name}.ipynb").encode() for name in names}
    changed = [name for name in names if _differs(labs / f"{name}.ipynb", fresh[name])]
    work = [name for name in changed if (labs / f"{name}.ipynb").exists()]
    kept = labs / "kept" / datetime.now().strftime("%Y-%m-%dT%H-%M-%S") if work else None
    if dry_run or not changed:
        return changed, kept
    with ExitStack() as stack:
        labs.mkdir(exist_ok=True)
        halves = {}
        for name in changed:  # all of them before the first is exchanged: a full disk shows here
            halves[name] = labs / f".{name}.ipynb.tmp"
            stack.callback(halves[name].unlink, missing_ok=True)
            _write(halves[name], fresh[name])
        if kept:
            kept = _new_folder(kept)
        for name in changed:
            if name in work and kept:
                _keep(labs / f"{name}.ipynb", kept / f"{name}.ipynb")
            os.replace(halves[name], labs / f"{name}.ipynb")
    return changed, kept


class _Strict(Store):
    """A store that fails where the file cannot be written, instead of going on in memory as for a notebook."""

    def _warn(self, error: OSError) -> None:
        raise error


def reset_progress(names: Sequence[str] | None = None) -> Path | None:
    """Forget what was recorded of these labs, of everything for None; gives the copy of what was there before.

    The copy lies beside the progress file, readable by its learner alone. None where nothing was recorded. Raises
    OSError when the copy, or then the file, cannot be written: what was recorded is there as before.
    """
    path = progress.progress_path()
    aside = path.with_name(f"progress.kept-{datetime.now().strftime('%Y%m%dT%H%M%S.%f')}.json")

    def forget(now: Progress) -> None:
        gone = [lab for lab in now.labs if names is None or lab in names]
        if gone or (names is None and now.ledger):
            _write(aside, now.to_json().encode(), new=True)
        for lab in gone:
            del now.labs[lab]
        if names is None:
            now.ledger.clear()

    if not path.exists():
        return None
    _Strict(path).update(forget)  # under the lock that notebooks take, too
    return aside if aside.exists() else None


def _differs(lab: Path, fresh: bytes) -> bool:
    """Whether the lab is not at its start. Raises ValueError for a link or a folder in its place."""
    try:
        if not stat.S_ISREG(lab.lstat().st_mode):
            raise ValueError(f"{lab} is a link or no file: move it away yourself, then reset again")
        return lab.read_bytes() != fresh
    except FileNotFoundError:
        return True


def _write(path: Path, data: bytes, *, new: bool = False) -> None:
    """Write, and wait until it is on the disk. `new`: mode 0600, and FileExistsError instead of writing over a file."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC)
    with open(os.open(path, flags, 0o600 if new else 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _new_folder(wanted: Path) -> Path:
    """`wanted`, or with -2, -3 … behind it where that is taken."""
    wanted.parent.mkdir(exist_ok=True)
    for number in range(1, 1000):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{wanted.parent} is full of folders of this second")


def _keep(work: Path, aside: Path) -> None:
    """Give the file a second name; where the file system knows no such thing, a copy that is on the disk."""
    try:
        os.link(work, aside)
    except OSError:
        try:
            shutil.copy2(work, aside)
            with open(aside, "rb+") as file:
                os.fsync(file.fileno())
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def main(argv: Sequence[str] | None = None) -> int:
    """Reset, and say where the work lies. Returns 1 when something could not be written, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="beyond class reset", description="Labs back to their start; the work in them is kept."
    )
    parser.add_argument("--lab", nargs="+", action="extend", default=[], metavar="05", help="these; all without it")
    parser.add_argument("--progress", action="store_true", help="forget what was passed in them, too (a copy is kept)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that holds solutions/ and labs/")
    given = parser.parse_args(argv)
    try:
        names = chosen(given.lab, given.root)
        changed, kept = reset_labs(names, given.root, dry_run=given.dry_run)
        would = "would be " if given.dry_run else ""
        for name in names:
            print(f"labs/{name}.ipynb: {f'{would}back to its start' if name in changed else 'at its start already'}")
        if kept:
            print(f"The work in them {'would be ' if given.dry_run else 'is '}kept in {kept}.")
            print("JupyterLab still shows the old ones: close them there without saving, then open them again.")
        if given.progress and given.dry_run:
            print(
                f"What was recorded of {'these labs' if given.lab else 'everything'} would be forgotten, a copy kept."
            )
        elif given.progress:
            aside = reset_progress(names if given.lab else None)
            print(f"Progress forgotten; as it was before: {aside}" if aside else "No progress was recorded of them.")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"Not everything could be written ({error}); nothing is lost: mend that, then reset again.", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
