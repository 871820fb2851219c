"""Write every metric of every rank to files that need no account, and read them back, all ranks together.

>>> with Tracker(folder, rank=rank) as tracker:       # in each rank
...     tracker.log(step, loss=loss, tokens_per_second=speed)
>>> read(folder)[2]["loss"]                                         # [(step, value, time), …] of rank 2
"""

from course_lib.observe.tracking.event_files import read
from course_lib.observe.tracking.tracker import Tracker

__all__ = ["Tracker", "read"]
