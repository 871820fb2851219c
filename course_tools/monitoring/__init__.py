"""A watchdog that reads the heartbeats of all ranks and says which one stopped, how, and where.

>>> with Heartbeat(folder, rank=rank, every=5) as heartbeat:        # in the training program
...     for step in range(steps):
...         heartbeat.beat(step, "data")
...         ...
...         heartbeat.beat(phase="backward")
>>> with Watchdog(folder, ranks=4, webhook=url) as watchdog:        # in the notebook, or beyond watch
...     ...
>>> watchdog.alarms[0].sentence
"""

from course_tools.monitoring.judge import Event, Judge
from course_tools.monitoring.watchdog import Watchdog
from course_tools.monitoring.webhook import Inbox

__all__ = ["Event", "Inbox", "Judge", "Watchdog"]
