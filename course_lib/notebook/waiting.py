"""A long cell says that it lives: after three seconds how long it has run, or how long it still takes; stopped, one line.

takes(seconds=12)  # a cell's first line, where its author knows the time: 12 s on two CPU cores
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from course_lib.notebook.guesses import somebody_looks_on
from course_lib.notebook.page import Page

SILENT = 3.0
"""Seconds that a cell may run without a word."""
EVERY = 1.0
"""Seconds between two updates of its line."""


class StatusLine:
    """One cell's line, updated in place until the cell ends; no line where it ends within `SILENT` seconds."""

    def __init__(self) -> None:
        self.expected: float | None = None  # seconds that the cell takes on two CPU cores
        self._began, self._over, self._lock = time.monotonic(), threading.Event(), threading.Lock()
        self._shown: Any = None
        self._thread = threading.Thread(target=self._keep, daemon=True, name="how long the cell still takes")
        self._thread.start()

    def show(self) -> None:
        """Put the line below the cell, or bring it up to date."""
        from IPython.display import display

        page = Page(f"<small role='status'>{self}</small>", str(self))
        with self._lock:
            if self._shown is None:
                self._shown = display(page, display_id=True)
            else:
                self._shown.update(page)

    def end(self) -> None:
        """The cell has ended, one way or another: the line, where there is one, says how long it took."""
        self._over.set()
        self._thread.join()
        if self._shown is not None:
            self.show()

    def __str__(self) -> str:
        gone = time.monotonic() - self._began
        if self._over.is_set():
            return f"took {gone:.0f} s"
        if self.expected is None:
            return f"running, {gone:.0f} s so far"
        left = self.expected - gone
        on_two = f"{gone:.0f} s so far (about {self.expected:g} s on two CPU cores)"
        return f"about {left:.0f} s left" if left > 0 else on_two

    def _keep(self) -> None:
        wait = SILENT
        while not self._over.wait(wait):
            self.show()
            wait = EVERY


_line: StatusLine | None = None  # of the cell that runs now


def takes(*, seconds: float) -> None:
    """Say how long this cell still takes, from now until it ends; `seconds` is its time on two CPU cores.

    Without a person in front of the notebook (nbconvert, nbval, plain Python) there is no line.
    """
    if _line is not None:
        _line.expected = seconds
        _line.show()


def watch_cells() -> None:
    """From now on each cell of this notebook has a line, and one that is stopped says so in one more."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not somebody_looks_on() or _line is not None:
        return
    shell.events.register("pre_run_cell", _begin)
    shell.events.register("post_run_cell", _end)
    shell.set_custom_exc((KeyboardInterrupt,), _stopped)
    _begin()  # the cell that brings this in imports PyTorch, too


def _begin(_: Any = None) -> None:
    global _line
    _line = StatusLine()


def _end(_: Any = None) -> None:
    if _line is not None:
        _line.end()


def _stopped(shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: int | None = None) -> list[str]:
    """What a stopped cell shows instead of a page of traceback; an error that has its own words (launch's) says those."""
    own_words = getattr(error, "_render_traceback_", None)
    while trace is not None and trace.tb_frame.f_globals is not shell.user_ns:
        trace = trace.tb_next
    where = f" in its line {trace.tb_lineno}" if trace is not None else ""
    lines = own_words() if own_words else [f"KeyboardInterrupt: you stopped this cell{where}."]
    shell._showtraceback(kind, error, lines)
    return lines
