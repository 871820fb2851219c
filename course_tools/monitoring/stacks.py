"""Where a rank is: its Python stack, requested by a signal, and whether it waits there for other ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil

from course_lib.launch.failures import nearest_line
from course_lib.launch.failures import place as source_line
from course_lib.observe.heartbeat import Beat

Stack = list[tuple[str, int, str]]  # (file, line, function), outermost call first
_LINE = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_OUTERMOST = re.compile(
    r"( in (<module>|_run_module_as_main|_bootstrap)| *\.\.\.)\n\Z"
)  # dots end a stack of over a hundred calls
_IN = os.sep + os.path.join("torch", "distributed") + os.sep
_LAUNCHERS = tuple(_IN + part for part in ("elastic", "launcher", "run.py"))  # what started the rank is no waiting
_WAITING = (
    _IN,
    os.path.join("torch", "autograd", "graph.py"),
    os.path.join("torch", "nn", "parallel", "distributed.py"),  # DDP broadcasts buffers before its forward pass
)


def alive(beat: Beat, host: str) -> bool | None:
    """Return whether the process of a beat still runs; None if it ran on another machine than ``host``."""
    if beat.host != host:
        return None
    try:
        process = psutil.Process(beat.pid)
        return process.create_time() == beat.born and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # another user's process: it exists
        return True


def ask(beats: list[Beat], folder: str, host: str, seconds: float) -> dict[int, Stack]:
    """Return the stacks of the ranks that answer within ``seconds``; the handler is C, so a rank stuck in C answers too.

    Only a process that announced its handler is signalled: SIGUSR2 would end any other.
    """
    asked: dict[int, tuple[Path, int]] = {}
    for beat in beats:
        path = Path(folder) / beat.stack
        if not beat.stack or not path.is_file() or not alive(beat, host):
            continue
        size = path.stat().st_size
        try:
            os.kill(beat.pid, signal.SIGUSR2)
        except OSError:  # it ended just now, or is another user's
            continue
        asked[beat.rank] = path, size
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(_is_complete(_written(*place)) for place in asked.values()):
        time.sleep(0.005)
    return {rank: frames for rank, place in asked.items() if (frames := _frames(_written(*place)))}


def _written(path: Path, start: int) -> str:
    return path.read_bytes()[start:].decode(errors="replace")  # innermost call first


def _is_complete(text: str) -> bool:
    """Return whether the outermost call is there: a busy machine may stop a rank between two lines of its stack."""
    return bool(_OUTERMOST.search(text))


def _frames(text: str) -> Stack:
    return [(m["file"], int(m["line"]), m["function"]) for m in _LINE.finditer(text)][::-1]


def waits(stack: Stack) -> bool:
    """Return whether a rank is inside a collective or a backward pass: it waits for others, or will.

    Only calls below the program's innermost own line count: a hook that sleeps in a backward pass does not wait.
    """
    for path, line, function in reversed(stack):
        if nearest_line([(path, line, function)]):
            return False
        if any(sign in path for sign in _WAITING) and not any(sign in path for sign in _LAUNCHERS):
            return True
    return False


def where(stack: Stack) -> str:
    """Return the learner's own line, else the training program's, else the innermost."""
    line = nearest_line(stack) or (stack[-1][0], stack[-1][1])
    return source_line(*line)
