"""What a checkpoint can be wrong in, told in one sentence."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved or loaded; the message says why, and what is still whole."""


def system_error(error: BaseException | None) -> OSError | None:
    """What the system said, where another error came of it: torch's writer of zip files hides a full disk behind its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def reason(error: BaseException, folder: Path) -> str:
    """One line for what went wrong while writing below ``folder``, with the bytes that its disk has left."""
    told = system_error(error)
    if told is not None and told.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk is full"
    elif told is not None and told.strerror:
        why = told.strerror
    else:
        why = (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
    try:
        free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    except (OSError, StopIteration):
        return why
    return f"{why} ({free / 1e9:.2f} GB are free there)"
