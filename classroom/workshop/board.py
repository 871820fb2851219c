"""``beyond class board FOLDER --out board.html``: the class's progress as a page, written again every few seconds.

FOLDER holds a folder for each learner with progress.json in it, or files such as ada.json; a pattern does, too:
``board '/home/*/.local/share/beyond-one-gpu/progress.json'``. To have them in one place, start each learner's JupyterLab
with BEYOND_ONE_GPU_HOME=/srv/class/ada. Only its owner may read a progress file (mode 0600): run the board as root, or
copy the files together with their times (rsync -t). Names are what the folders are called. The page is one file
without scripts that loads itself again: open it in a browser; to show it on other machines, serve its folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from classroom.workshop import board_page, class_files, standing
from course_lib.files import write_atomically
from course_lib.notebook import contents


class Board:
    """The class as it stands."""

    def __init__(self, folder: str):
        """Raises ValueError for a folder that is not there."""
        self.labs = contents.labs()
        self.where = class_files.class_folder(folder)
        self._reader = class_files.Reader(self.where, lambda progress: standing.in_short(progress, self.labs))

    def read(self) -> list[class_files.Found[standing.Told]]:
        """Every learner. Raises OSError when the class's folder cannot be listed."""
        return self._reader.read()

    def page(self, order: str = "name", every: float | None = None) -> str:
        """The page as HTML; `every` makes a browser load it again after so many seconds. Raises OSError as `read`."""
        return board_page.page(self.read(), self.labs, order, every)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page until Ctrl-C, or once. Returns 2 for a folder or a file that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="beyond class board", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", help="one folder or file for each learner, or a pattern in quotes")
    parser.add_argument(
        "--out", type=Path, default=Path("board.html"), metavar="OUT.html", help="the page (board.html)"
    )
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks (5)")
    parser.add_argument("--sort", choices=list(standing.ORDERS), default="name")
    parser.add_argument("--once", action="store_true", help="write the page once and end")
    given = parser.parse_args(argv)
    if not 1 <= given.every <= 3600:
        parser.error("--every takes 1 to 3600 seconds")
    try:
        board, out = Board(given.folder), given.out.absolute()
        if out.resolve().is_relative_to(board.where.folder.resolve()):
            raise ValueError(f"{out} lies in the class's folder, which is only read: give --out a place outside it")
        write_atomically(out, board.page(given.sort, None if given.once else given.every))
        print(
            f"Written: {out}" + ("" if given.once else f", again every {given.every:g} s (Ctrl-C ends it)"), flush=True
        )
        while not given.once:
            time.sleep(given.every)
            write_atomically(out, board.page(given.sort, given.every))
    except KeyboardInterrupt:
        print()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename or given.folder}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
