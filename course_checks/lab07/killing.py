"""A real child process that is killed at the n-th thing that it does to files, and what the disk holds afterwards.

Inside a rank. `sys.setprofile` sees every C function that Python code calls: opening, writing, renaming, also from
inside torch and pathlib. The n-th of them that touches files is where the child gets its SIGKILL, so that no moment is
left to luck. A power failure takes more: what was written and not fsynced is torn then.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOKS_ONLY = frozenset(
    "getpid fspath stat lstat fstat scandir listdir getcwd urandom get_terminal_size cpu_count read readline seek tell "
    "isatty fileno readable writable seekable getvalue getbuffer readinto access load get times umask".split()
)
KILLED = -signal.SIGKILL
_synced: dict[int, tuple[int, int]] = {}  # inode -> (bytes, time) when it was last made safe


def touches_files(function: Any) -> bool:
    """Whether a C function writes, names or removes something: of posix, of a file object, of torch's own writer."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    # posix._path_...: os.path's work on strings, which Python 3.13 moved to C; pathlib keeps what it found
    if name in LOOKS_ONLY or name.startswith("_path_"):
        return False
    kind = type(owner)
    if kind.__module__ == "_io":
        return kind.__name__ not in ("BytesIO", "StringIO")
    return (
        getattr(function, "__module__", None) in ("posix", "_io", "io", "_pickle", "_posixsubprocess")
        or "FileWriter" in kind.__name__
        or name in ("serialize_file", "tofile")
    )


class Deed:
    """One thing done in a child: ``code`` is its exit code (KILLED after a SIGKILL), ``said`` what it raised."""

    def __init__(self, code: int, said: str, events: int) -> None:
        self.code, self.said, self.events = code, said, events


def in_a_child(
    act: Callable[[], Any], folder: Path, *, kill_at: int | None = None, power: bool = False, room: int | None = None
) -> Deed:
    """Run ``act`` in a fork of this process.

    Args:
        act: what to do.
        folder: where it writes; with ``power`` the files in it that were not fsynced lose their second half.
        kill_at: the number of the event, from 0, before which the child is killed; None lets it end.
        power: the machine loses its power there (or, with ``kill_at`` None, a moment after ``act`` returned).
            What was synced is known only inside `noting_what_is_synced`.
        room: bytes that a file may grow to; more is refused by the kernel, as on a full disk.
    """
    reading, writing = os.pipe()
    before = _inodes(folder)
    child = os.fork()
    if not child:
        _child(act, folder, before, kill_at, power, room, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    events, _, said = told.partition("\n")
    return Deed(code, said, int(events or 0))


def _child(
    act: Callable[[], Any], folder: Path, before: dict, kill_at: int | None, power: bool, room: int | None, pipe: int
) -> None:
    """Never returns."""
    events, said, code = 0, "", 0
    _synced.clear()

    def die() -> None:
        sys.setprofile(None)
        if power:
            _tear(folder, before)
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(_frame: Any, event: str, function: Any) -> None:
        nonlocal events
        if event == "c_call" and touches_files(function):
            if events == kill_at:
                die()
            events += 1

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if room is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try:
        sys.setprofile(watch)
        act()
        sys.setprofile(None)
    except BaseException as error:  # whatever the learner raises is told, and judged by the parent
        sys.setprofile(None)
        said, code = f"{type(error).__name__}: {error}", 1
        if isinstance(error, NotImplementedError):
            code = 2
    if power and not code:
        die()
    os.write(pipe, f"{events}\n{said[:2000]}".encode())
    os._exit(code)


@contextmanager
def noting_what_is_synced() -> Iterator[None]:
    """os.fsync and os.fdatasync note what they made safe, under every name that some module has for them."""
    real = {name: function for name in ("fsync", "fdatasync") if (function := getattr(os, name, None))}

    def sync(fd: Any) -> None:
        real["fsync"](fd)
        at = os.fstat(fd if isinstance(fd, int) else fd.fileno())
        _synced[at.st_ino] = (at.st_size, at.st_mtime_ns)

    places = [
        (names, name)
        for module in list(sys.modules.values())
        for name, function in real.items()
        if (names := getattr(module, "__dict__", {})).get(name) is function
    ]
    for names, name in places:
        names[name] = sync
    try:
        yield
    finally:
        for names, name in places:
            names[name] = real[name]


def _inodes(folder: Path) -> dict[int, tuple[int, int]]:
    return {at.st_ino: (at.st_size, at.st_mtime_ns) for _, at in _files(folder)}


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    return [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def _tear(folder: Path, before: dict[int, tuple[int, int]]) -> None:
    """Of what this process wrote and did not fsync, half is lost: the name was on the disk before the bytes."""
    for path, at in _files(folder):
        now = (at.st_size, at.st_mtime_ns)
        if now not in (before.get(at.st_ino), _synced.get(at.st_ino)):
            os.truncate(path, at.st_size // 2)


def used_bytes(folder: Path) -> int:
    """Bytes of all files in a folder, hidden ones and those in sub-folders too."""
    return sum(at.st_size for _, at in _files(folder))
