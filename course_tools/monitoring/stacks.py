"""Where a rank is: its Python stack, requested by a signal, and whether it waits there for other ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil

from course_lib.launch.failures import nearest_line, place
from course_lib.observe.heartbeat import Beat

Stack = list[tuple[str, int, str]]  # (file, line, function), outermost call first
_LINE = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
# a busy machine may stop a rank between two lines of its stack; dots end one of over a hundred calls
_OUTERMOST = re.compile(r"( in (<module>|_run_module_as_main|_bootstrap)| *\.\.\.)\n\Z")
# DDP broadcasts buffers before its forward pass; what started a rank is no waiting
_WAITING = re.compile(
    r"torch/(distributed/(?!elastic|launcher|run\.py)|autograd/graph\.py|nn/parallel/distributed\.py)"
)


def alive(beat: Beat) -> bool | None:
    """Return whether the process of a beat still runs; None if it ran on another machine."""
    if beat.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(beat.pid)
        return process.create_time() == beat.born and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # another user's process: it exists
        return True


def stacks_of(beats: list[Beat], folder: str | os.PathLike[str], seconds: float) -> dict[int, Stack]:
    """Return the stacks of the ranks that answer within ``seconds``; a rank that is stuck in C answers, too.

    Only a process that announced its handler is signalled: SIGUSR2 would end any other.
    """
    asked: dict[int, tuple[Path, int]] = {}
    for beat in beats:
        path = Path(folder) / beat.stack
        if beat.stack and path.is_file() and alive(beat):
            size = path.stat().st_size
            try:
                os.kill(beat.pid, signal.SIGUSR2)
                asked[beat.rank] = path, size
            except OSError:  # it ended just now, or is another user's
                pass
    deadline = time.monotonic() + seconds
    written: dict[int, str] = {}
    while len(written) < len(asked) or not all(map(_OUTERMOST.search, written.values())):
        written = {rank: path.read_bytes()[size:].decode(errors="replace") for rank, (path, size) in asked.items()}
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    calls = {rank: list(_LINE.finditer(text))[::-1] for rank, text in written.items()}  # innermost call first
    return {rank: [(m["file"], int(m["line"]), m["function"]) for m in found] for rank, found in calls.items() if found}


def waits(stack: Stack) -> bool:
    """Return whether a rank is inside a collective or a backward pass: it waits for others, or will.

    Only calls below the program's innermost own line count: a hook that sleeps in a backward pass does not wait.
    """
    for call in reversed(stack):
        if nearest_line([call]):
            return False
        if _WAITING.search(call[0]):
            return True
    return False


def where(stack: Stack) -> str:
    """Return the learner's own line, else the training program's, else the innermost."""
    return place(*(nearest_line(stack) or stack[-1][:2]))
