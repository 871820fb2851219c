"""What a notebook's page shows: sources, tables, widgets, the reader's guesses and progress."""

from course_lib.notebook.guesses import ask, measured
from course_lib.notebook.page import show, table
from course_lib.notebook.waiting import takes, watch_cells

__all__ = ["ask", "measured", "show", "table", "takes"]

watch_cells()
