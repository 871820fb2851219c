"""What a notebook's page shows: sources, tables, widgets, the learner's guesses and progress."""

from course_lib.notebook.page import show, table

__all__ = ["show", "table"]
