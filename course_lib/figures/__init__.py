"""Every picture of the course, in one look. Each function takes numbers and gives back a picture with its text."""

from course_lib.figures.ledger import ledger
from course_lib.figures.style import nice_bytes
from course_lib.figures.training import bars, losses, throughput, timeline

__all__ = ["bars", "ledger", "losses", "nice_bytes", "throughput", "timeline"]
