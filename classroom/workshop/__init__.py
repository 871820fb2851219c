"""A day with a class on one box: what the instructor runs beside the lessons, ``beyond class``."""
