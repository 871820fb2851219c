"""One line that says how long a cell still takes, while it runs.

takes(seconds=12)  # a cell's first line; 12 s on two CPU cores
"""

from __future__ import annotations

import sys
import threading
import time

from course_lib.notebook.guesses import somebody_looks_on
from course_lib.notebook.page import Page

EVERY = 1.0
"""Seconds between two updates of the line."""


def takes(*, seconds: float) -> None:
    """Show how long this cell still takes, from now until it ends, however it ends.

    Args:
        seconds: how long the cell takes on two CPU cores.

    Without a person in front of the notebook (nbconvert, nbval, plain Python) there is no line.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not somebody_looks_on() or threading.current_thread() is not threading.main_thread():
        return
    began, over = time.monotonic(), threading.Event()

    def line() -> Page:
        gone = time.monotonic() - began
        if over.is_set():
            text = f"took {gone:.0f} s"
        elif gone < seconds:
            text = f"about {seconds - gone:.0f} s left"
        else:
            text = f"{gone:.0f} s so far (about {seconds:g} s on two CPU cores)"
        return Page(f"<small role='status'>{text}</small>", text)

    from IPython.display import display

    shown = display(line(), display_id=True)

    def update() -> None:
        while not over.wait(EVERY):
            shown.update(line())

    thread = threading.Thread(target=update, daemon=True, name="how long the cell still takes")

    def end(_: object) -> None:
        shell.events.unregister("post_run_cell", end)
        over.set()
        thread.join()
        shown.update(line())

    thread.start()
    shell.events.register("post_run_cell", end)
