"""The folder of a pool: files that learners lock, each with a record of who holds it.

    door              locked for the milliseconds in which somebody looks, sits down or takes GPUs
    gpu0, gpu1, …     locked by who has the GPU
    seat00, seat01, … locked by who waits

`make` puts them there once; nobody creates or removes one afterwards. So the folder need not be writable for the class
(0755, the files 0666), and nobody can put a link or a file of their own in the place of one. What the records say is other
people's input: the lock alone decides, the record only names.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from typing import Any

from course_lib.launch.leases.machine import network_file_system

DOOR, SEATS = "door", 64
RECORD_BYTES = 1024  # every record is padded to this, so that one write replaces it whole
NAME_CHARACTERS = 40
_ours: set[int] = set()  # descriptors that hold locks, which a fork of this process must not


def _forget() -> None:
    for descriptor in _ours:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _ours.clear()


os.register_at_fork(after_in_child=_forget)


def gpu_file(gpu: int) -> str:
    return f"gpu{gpu}"


def seat_file(seat: int) -> str:
    return f"seat{seat:02d}"


def make(folder: str, gpus: int) -> None:
    """Put the files of a pool of ``gpus`` GPUs into ``folder``, which is made too. Several may do so at once.

    Raises:
        ValueError: the folder has other things in it, or belongs to somebody else.
        OSError: it cannot be written.
    """
    os.makedirs(folder, mode=0o755, exist_ok=True)
    if os.stat(folder).st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to somebody else: choose another, or let its owner run `gpus init`.")
    names = [gpu_file(g) for g in range(gpus)] + [seat_file(s) for s in range(SEATS)] + [DOOR]  # the door comes last
    strangers = set(os.listdir(folder)) - set(names)
    if strangers:
        raise ValueError(f"{folder} has other files in it ({min(strangers)}): choose a new folder for the leases.")
    os.chmod(folder, 0o755)
    for name in names:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            try:
                os.fchmod(descriptor, 0o666)  # whatever the umask
                _reserve(descriptor)
            finally:
                os.close(descriptor)


def _reserve(descriptor: int) -> None:
    """Room for one record, so that a disk which fills up later leaves nobody without a name."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, RECORD_BYTES)
    else:
        os.ftruncate(descriptor, RECORD_BYTES)


def gpus_in(folder: str) -> int | None:
    """The GPUs of the pool in ``folder``; None where there is no pool yet."""
    try:
        names = set(os.listdir(folder))
        if DOOR not in names:
            return None
        remote = network_file_system(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{folder} cannot be read ({error.strerror}): is it the folder of the leases?") from None
    if remote:
        raise ValueError(
            f"{folder} lies on a network file system ({remote}): leases need a folder of this machine's own."
        )
    gpus = sum(re.fullmatch(r"gpu\d+", name) is not None for name in names)
    missing = ({gpu_file(g) for g in range(gpus)} | {seat_file(s) for s in range(SEATS)}) - names
    if missing or not gpus:
        raise ValueError(f"{folder} is damaged ({min(missing or {'gpu0'})} is gone): let its owner make a new folder.")
    return gpus


def open_file(folder: str, name: str) -> int:
    """A descriptor of one of the files. Raises ValueError for a link, a pipe, and a file that this user may not open."""
    path = f"{folder}/{name}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise ValueError(f"{path} cannot be used ({why}): let its owner make a new folder for the leases.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no plain file: let its owner make a new folder for the leases.")
    return descriptor


def lock(folder: str, name: str) -> int | None:
    """Lock one of the files for as long as the descriptor is open; None where somebody else has it."""
    descriptor = open_file(folder, name)
    _ours.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        unlock(descriptor)
        return None
    except BaseException:
        unlock(descriptor)
        raise
    return descriptor


def unlock(descriptor: int) -> None:
    """Closing is enough. (An explicit unlock would end it for a command, too, that the descriptor was handed to.)"""
    if descriptor in _ours:  # a fork of the process has closed it already
        _ours.discard(descriptor)
        os.close(descriptor)


def look(folder: str, name: str) -> tuple[bool, bytes]:
    """Whether somebody has the file locked, and what it says (nothing: it was never locked). For who holds the door: looking takes the lock for a moment."""
    descriptor = open_file(folder, name)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            locked = False
        except BlockingIOError:
            locked = True
        return locked, os.pread(descriptor, RECORD_BYTES + 1, 0).strip(b"\0")
    finally:
        os.close(descriptor)


def write_record(descriptor: int, record: dict[str, Any]) -> None:
    """Say who holds it, in one write of RECORD_BYTES bytes. Where that fails nobody is named; the lock holds all the same."""
    data = json.dumps(record).encode().ljust(RECORD_BYTES)
    assert len(data) == RECORD_BYTES, "names are cut to NAME_CHARACTERS"
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, RECORD_BYTES)


def read_record(data: bytes, kinds: dict[str, type]) -> dict[str, Any] | None:
    """The record, every key of ``kinds`` of its type (numbers 0 to 2**63); None for anything else."""
    if len(data) > RECORD_BYTES:
        return None
    try:
        raw = json.loads(data)
        record = {key: raw[key] for key in kinds}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    for key, kind in kinds.items():
        value = record[key]
        if type(value) is not kind or (kind is not str and not 0 <= value < 2**63):
            return None
    return record | {"name": plain_name(record.get("name", ""))}


def plain_name(name: str) -> str:
    """A name as it may be printed: one line, no control characters, at most NAME_CHARACTERS long; "somebody" for none."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return plain[:NAME_CHARACTERS] or "somebody"
