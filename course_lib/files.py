"""Write a file so that a reader finds the old content or the new, never a half of either."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: str | bytes, *, durable: bool = False) -> None:
    """Replace `path` by a file that holds `content`; text is written as UTF-8 with its line ends as they are.

    Args:
        path: the file; its folder must exist. Its permissions are kept where it exists already.
        content: all of the new content.
        durable: wait until the disk has it, so that it also survives a power cut.

    Raises:
        OSError: nothing could be written; the old file is as it was, and no temporary file is left.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o022)  # it can only be read by setting it
    os.umask(mask)
    return mask
