"""Progress files of a class, each somebody else's input: read only, never followed, never waited for.

A learner may put anything where the progress file should lie: a link to a file that only the instructor may read, a
named pipe on which a reader waits for ever, gigabytes, another JSON. Every part of the way below the instructor's own
folder is opened without following links, only a regular file is read, and no more of it than a progress file may have.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from course_lib.notebook.progress import MAX_BYTES, Progress

MOST_LEARNERS = 500
NAME_LENGTH = 40
LINK = "a symbolic link, which is not followed"
Told = TypeVar("Told")
_CAREFULLY = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


@dataclass(frozen=True)
class ClassFolder:
    """Where the progress files lie.

    Attributes:
        folder: the instructor's own folder, which may be reached by links.
        pattern: what a learner's entry in it is called, '*' for all.
        below: the way from there to the file; empty when the entry itself is the file.
        mixed: entries may be folders and files side by side.
    """

    folder: Path
    pattern: str
    below: tuple[str, ...]
    mixed: bool = False


@dataclass(frozen=True)
class Found(Generic[Told]):
    """One learner's file.

    Attributes:
        name: what the folder or the file is called, cleaned by `shown`; not escaped.
        key: the same as it is, which tells two learners apart whose names look alike.
        told: what the file holds, in short; an empty progress where there is no file; None where it cannot be read.
        why: why it cannot be read, in a few words that may quote the file; not escaped; empty otherwise.
        changed: time of the file's last change, seconds since 1970; None without a file.
    """

    name: str
    key: str
    told: Told | None
    why: str = ""
    changed: float | None = None


def class_folder(given: str) -> ClassFolder:
    """Understand `FOLDER`, or a pattern such as '/home/*/.local/share/beyond-one-gpu/progress.json'.

    A folder holds one folder for each learner, with progress.json in it, or files such as ada.json. Raises ValueError
    with one sentence for a folder that is not there and a pattern with more than one wildcard part.
    """
    path = Path(given).expanduser().absolute()
    wild = [i for i, part in enumerate(path.parts) if any(letter in part for letter in "*?[")]
    if path.exists() or not wild:
        wild = []
        where = ClassFolder(path, "*", ("progress.json",), mixed=True)
    else:
        where = ClassFolder(Path(*path.parts[: wild[0]]), path.parts[wild[0]], path.parts[wild[0] + 1 :])
    if len(wild) > 1:
        raise ValueError(f"{given}: only one part may hold a wildcard, the one that is the learner's name")
    if not where.folder.is_dir():
        raise ValueError(f"{where.folder} is not a folder: give the one that holds a folder or a file for each learner")
    return where


class Reader(Generic[Told]):
    """Reads a class again and again; a file that has not changed is not read twice.

    `in_short` makes of a progress what is kept of it: whole, the files of a class may take gigabytes of memory.
    """

    def __init__(self, where: ClassFolder, in_short: Callable[[Progress], Told]):
        self.where, self.in_short = where, in_short
        self._known: dict[str, tuple[tuple[int, ...], Found[Told]]] = {}

    def read(self) -> list[Found[Told]]:
        """Every learner, by name, MOST_LEARNERS at most. Raises OSError when the class's own folder cannot be listed."""
        top = os.open(self.where.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = [self._learner(top, entry, way) for entry, way in _entries(self.where, top)]
        finally:
            os.close(top)
        there = {one.key for one in found}
        self._known = {key: kept for key, kept in self._known.items() if key in there}
        return found

    def _learner(self, top: int, entry: str, way: tuple[str, ...]) -> Found[Told]:
        name = shown(entry if way else entry.removesuffix(".json")) or "(a name that cannot be shown)"
        try:
            with ExitStack() as stack:
                here = top
                for part in (entry, *way)[:-1]:
                    here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _CAREFULLY, dir_fd=here)
                    stack.callback(os.close, here)
                last = (entry, *way)[-1]
                _regular(os.lstat(last, dir_fd=here))
                # It may be exchanged for a pipe now: opened without waiting, and looked at again.
                file = os.open(last, os.O_RDONLY | _CAREFULLY, dir_fd=here)
                stack.callback(os.close, file)
                state = os.fstat(file)
                _regular(state)
                version = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
                if entry not in self._known or self._known[entry][0] != version:
                    self._known[entry] = (version, self._parsed(name, entry, file, state))
                return self._known[entry][1]
        except FileNotFoundError:  # nothing tried yet
            return Found(name, entry, self.in_short(Progress()))
        except ValueError as error:
            return Found(name, entry, None, f"cannot be read: {error}")
        except OSError as error:
            links = {errno.ELOOP: LINK, errno.ENOTDIR: "the folder is a link, or no folder"}
            why = links.get(error.errno or 0, (error.strerror or type(error).__name__).lower())
            return Found(name, entry, None, f"cannot be read: {why}")

    def _parsed(self, name: str, entry: str, file: int, state: os.stat_result) -> Found[Told]:
        """What the file holds; never raises for it."""
        try:
            data = b""
            while len(data) <= MAX_BYTES and (more := os.read(file, MAX_BYTES + 1 - len(data))):
                data += more
            if len(data) > MAX_BYTES:
                raise ValueError(f"larger than {MAX_BYTES:,} bytes")
            told = self.in_short(Progress.from_json(data.decode("utf-8")))
            return Found(name, entry, told, changed=state.st_mtime)
        except (ValueError, OSError) as error:  # OSError: a newer course's file
            return Found(name, entry, None, f"cannot be read: {shown(str(error), 120)}", state.st_mtime)


def shown(text: str, length: int = NAME_LENGTH) -> str:
    """`text` on one line, without control, format (bidi) and unpaired surrogate characters, cut to `length`; not escaped."""
    text = text[: 20 * length]  # nothing that follows costs more for a longer one
    kept = "".join(letter if unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else " "
                   for letter in text)  # fmt: skip
    kept = " ".join(_few_marks(kept).split())
    return kept if len(kept) <= length else kept[: length - 1] + "…"


def _few_marks(text: str) -> str:
    """At most two combining marks behind a letter: a tower of them covers the lines above."""
    kept, marks = [], 0
    for letter in text:
        marks = marks + 1 if unicodedata.category(letter).startswith("M") else 0
        if marks <= 2:
            kept.append(letter)
    return "".join(kept)


def _entries(where: ClassFolder, top: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each learner's entry, and the way from there to the file."""
    count = 0
    for name in sorted(os.listdir(top)):
        if name.startswith(".") or not fnmatch.fnmatchcase(name, where.pattern):
            continue
        way = where.below
        if where.mixed:
            try:
                mode = os.lstat(name, dir_fd=top).st_mode
            except FileNotFoundError:
                continue  # gone since the listing
            if not stat.S_ISDIR(mode):
                if not name.endswith(".json") and not stat.S_ISLNK(mode):
                    continue  # a list or a note of the instructor's beside the folders
                way = ()
        count += 1
        if count > MOST_LEARNERS:
            return
        yield name, way


def _regular(state: os.stat_result) -> None:
    """Raises ValueError for anything but a file of bytes, before it is read."""
    if not stat.S_ISREG(state.st_mode):
        kinds = {stat.S_IFLNK: LINK, stat.S_IFIFO: "a named pipe, which is not opened", stat.S_IFDIR: "a folder"}
        raise ValueError(kinds.get(stat.S_IFMT(state.st_mode), "a socket or a device, which is not opened"))
