"""Write a file so that a reader finds the old content or the new, never a half of either."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(
    path: str | os.PathLike[str], content: str | bytes, *, durable: bool = False, mode: int | None = None
) -> None:
    """Replace `path` by a file that holds `content`; text is written as UTF-8 with its line ends as they are.

    Args:
        path: the file; its folder must exist. Its permissions are kept where it exists already.
        content: all of the new content.
        durable: wait until the disk has it, so that it also survives a power cut.
        mode: the file's permissions, such as 0o600; None keeps those it has, or takes the usual ones for a new file.

    Raises:
        OSError: nothing could be written; the old file is as it was, and no temporary file is left.
    """
    target = Path(path)
    if mode is None and target.exists():
        mode = target.stat().st_mode & 0o7777
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode), "wb"
        ) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
