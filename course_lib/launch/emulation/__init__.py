"""Emulate several hosts on one machine, with links of a chosen speed between them, GPUs that only take their time, and cards
that are too small.

>>> with emulated_hosts(hosts=3, link=Link("200 Mbit/s", 0, 25e6)) as machines:
...     print(machines)
...     run = machines.launch(train_step, lr=3e-4)      # as course_lib.launch.launch, one rank a host
"""

from course_lib.launch.emulation.delay import slow_link, through_the_link
from course_lib.launch.emulation.hosts import Hosts, emulated_hosts
from course_lib.launch.emulation.memory_limit import attempt, memory_limit
from course_lib.launch.emulation.namespaces import CannotEmulate
from course_lib.launch.emulation.step import emulated_model, emulated_step

__all__ = [
    "CannotEmulate",
    "Hosts",
    "attempt",
    "emulated_hosts",
    "emulated_model",
    "emulated_step",
    "memory_limit",
    "slow_link",
    "through_the_link",
]
