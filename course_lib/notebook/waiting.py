"""A long cell says that it is still running, or how long it still takes; an interrupted one says so in one line.

takes(seconds=12)  # a cell's first line, where its author knows the time: 12 s on two CPU cores
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from typing import Any

from course_lib.notebook.guesses import somebody_looks_on

SILENT = 3.0
"""Seconds that a cell may run without a word."""
EVERY = 1.0
"""Seconds between two updates of its line."""


class StatusLine:
    """One cell's line, updated in place until the cell ends.

    It comes after `SILENT` seconds, or with `show`, and below what the cell has printed until then. It goes to the page
    itself (`publisher`), also while the cell captures its own output.
    """

    def __init__(self, publisher: Any) -> None:
        self.expected: float | None = None  # seconds that the cell takes on two CPU cores
        self._publisher, self._display_id, self._is_shown = publisher, str(uuid.uuid4()), False
        self._began, self._over, self._lock = time.monotonic(), threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="a cell's status line")
        self._thread.start()

    def show(self) -> None:
        """Put the line below the cell, or bring it up to date."""
        data = {"text/html": f"<small role='status'>{self}</small>", "text/plain": str(self)}
        with self._lock:
            transient = {"display_id": self._display_id}
            self._publisher.publish(data=data, metadata={}, transient=transient, update=self._is_shown)
            self._is_shown = True

    def end(self) -> None:
        """The cell has ended, one way or another: its line, where there is one, goes."""
        self._over.set()
        self._thread.join()
        if self._is_shown:
            self.show()

    def __str__(self) -> str:
        if self._over.is_set():
            return ""
        gone = time.monotonic() - self._began
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


_running: list[StatusLine] = []  # of the cell that runs now, and of those inside it (%%capture runs a cell in a cell)
_is_watching = False


def takes(*, seconds: float) -> None:
    """Say how long this cell still takes, from now until it ends; `seconds` is its time on two CPU cores.

    Without a person in front of the notebook (nbconvert, nbval, plain Python) there is no line.
    """
    if _running:
        _running[-1].expected = seconds
        _running[-1].show()


def watch_cells() -> None:
    """From now on each cell of this notebook has a line, and one that is interrupted says so in one more."""
    global _is_watching
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not somebody_looks_on() or _is_watching:
        return
    _is_watching = True

    def begin(_: Any = None) -> None:
        _running.append(StatusLine(shell.display_pub))

    def end(_: Any = None) -> None:
        if _running:
            _running.pop().end()

    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", end)
    shell.set_custom_exc((KeyboardInterrupt,), _interrupted)
    begin()  # the cell that brings this in imports PyTorch, too


def _interrupted(shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: int | None = None) -> list[str]:
    """What an interrupted cell shows instead of a page of traceback; an error with its own words (launch's) says those."""
    own_words = getattr(error, "_render_traceback_", None)
    while trace is not None and trace.tb_frame.f_globals is not shell.user_ns:
        trace = trace.tb_next
    where = f" at line {trace.tb_lineno}" if trace is not None else ""
    lines = own_words() if own_words else [f"KeyboardInterrupt: you stopped this cell{where}."]
    shell._showtraceback(kind, error, lines)
    return lines
