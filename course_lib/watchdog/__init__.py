"""A heartbeat in every rank, and a watchdog that says which rank stopped, how, and where.

>>> with Heartbeat(folder, rank=rank, every=5) as heartbeat:        # in the training program
...     for step in range(steps):
...         heartbeat.beat(step, "data")
...         ...
...         heartbeat.beat(phase="backward")
>>> with Watchdog(folder, ranks=4, webhook=url) as watchdog:        # in the notebook, or python -m course_lib.watchdog
...     ...
>>> watchdog.alarms[0].sentence
"""

from course_lib.watchdog.alarm import Alarm, Recovery
from course_lib.watchdog.beats import Beat, read_beats
from course_lib.watchdog.heartbeat import Heartbeat
from course_lib.watchdog.rule import Judge
from course_lib.watchdog.watching import Watchdog

__all__ = ["Alarm", "Beat", "Heartbeat", "Judge", "Recovery", "Watchdog", "read_beats"]
