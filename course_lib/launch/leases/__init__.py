"""Lend the GPUs of one machine to a class: each learner gets one or two, first come, first served.

>>> pool = Pool("/var/tmp/gpus", gpus=4)
>>> with pool.lease(1, name="Ada") as lease:
...     train(on=lease.gpus)     # (2,)

A lease is a lock of the kernel on a file, so it ends with its process, however that ends. The folder is of this machine
only. `beyond class gpus` shows and makes it; with BEYOND_ONE_GPU_LEASES naming it, `launch` waits its turn.
"""

from course_lib.launch.leases.lease import NAME_VARIABLE, Lease, NoTurn
from course_lib.launch.leases.machine import COUNT_VARIABLE, count_gpus
from course_lib.launch.leases.pool import FOLDER_VARIABLE, Pool, for_run
from course_lib.launch.leases.state import Holder, Ticket

__all__ = [
    "COUNT_VARIABLE",
    "FOLDER_VARIABLE",
    "NAME_VARIABLE",
    "Holder",
    "Lease",
    "NoTurn",
    "Pool",
    "Ticket",
    "count_gpus",
    "for_run",
]
