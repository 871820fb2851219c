"""Emulate several hosts on one machine, with links of a chosen speed between them, and GPUs that only take their time.

>>> with emulated_hosts(hosts=3, link=Link("200 Mbit/s", 0, 25e6)) as machines:
...     print(machines)
...     run = machines.launch(train_step, lr=3e-4)      # as course_lib.launch.launch, one rank a host
"""

from course_lib.launch.emulation.delay import slow_link, through_the_link
from course_lib.launch.emulation.hosts import Hosts, emulated_hosts
from course_lib.launch.emulation.namespaces import CannotEmulate
from course_lib.launch.emulation.step import emulated_model, emulated_step

__all__ = [
    "CannotEmulate",
    "Hosts",
    "emulated_hosts",
    "emulated_model",
    "emulated_step",
    "slow_link",
    "through_the_link",
]
